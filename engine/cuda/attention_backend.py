"""The seam between the runner and attention kernels that plan a step on the host."""

from __future__ import annotations

from typing import Protocol

from engine.attention import Attention
from engine.cuda.kv_writer import KVWriter
from engine.cuda.packed_step import PackedStep
from engine.cuda.staging import Arrays, Staged


class DecodeAttention(Attention, Protocol):
    """Attention for decodes of one padded batch size, over tensors that stay where they are."""

    def plan(self, step: PackedStep, staged: Staged) -> None:
        """Before the same work is queued again: for these sequences. Never within a graph."""


class AttentionBackend(Protocol):
    """One kind of kernels, for one KV cache."""

    @property
    def name(self) -> str:
        """Under which people know it."""

    def arrays(self, step: PackedStep) -> Arrays:
        """What it needs on the device. Those of decodes of one batch size have equal shapes, except
        that the last one may be shorter."""

    def ragged(self, step: PackedStep, staged: Staged, writer: KVWriter) -> Attention:
        """For any batch, once."""

    def decode(self, num_seqs: int, staged: Staged, writer: KVWriter) -> DecodeAttention:
        """For decodes of this size, again and again."""
