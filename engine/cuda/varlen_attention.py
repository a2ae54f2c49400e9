"""Attention by `torch.nn.attention.varlen`: nothing to install, but half precision only, and blocks
of a multiple of 256 tokens, because of the FlashAttention 2 that torch has built in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.cuda.attention_backend import DecodeAttention
from engine.cuda.kv_writer import KVWriter
from engine.cuda.packed_step import PackedStep
from engine.cuda.staging import Arrays, Staged
from engine.kv_cache import KVCache

BLOCK_SIZE_UNIT = 256  # tokens

Kernel = Callable[..., Tensor]
"""As `torch.nn.attention.varlen.varlen_attn`."""


class VarlenBackend:
    """See `AttentionBackend`.

    With `batch_invariant` the keys of a sequence are never split among several blocks of threads,
    so that its numbers are added up in the same order whatever else is in the batch.
    """

    name = "varlen"

    def __init__(
        self,
        kv_cache: KVCache,
        max_model_len: int,
        *,
        batch_invariant: bool = False,
        kernel: Kernel = varlen_attn,  # type: ignore[assignment]
    ) -> None:
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._max_blocks = -(-max_model_len // kv_cache.config.block_size)
        self._num_splits = 1 if batch_invariant else None
        self._kernel = kernel

    def arrays(self, step: PackedStep) -> Arrays:
        tables = step.block_tables
        if step.is_decode:  # a graph reads all of the table's places, wherever a sequence ends
            width = self._max_blocks - tables.shape[1]
            tables = np.pad(tables, ((0, 0), (0, width)))
        return {"block_tables": tables}

    def ragged(self, step: PackedStep, staged: Staged, writer: KVWriter) -> VarlenAttention:
        longest = int(step.query_lens.max()), int(step.context_lens.max())
        return self._attention(staged.device, writer, longest)

    def decode(self, num_seqs: int, staged: Staged, writer: KVWriter) -> DecodeAttention:
        return self._attention(staged.device, writer, (1, self._max_model_len))

    def _attention(
        self, staged: Mapping[str, Tensor], writer: KVWriter, longest: tuple[int, int]
    ) -> VarlenAttention:
        return VarlenAttention(self._kernel, self._num_splits, staged, writer, longest)


class VarlenAttention:
    """See `engine.attention.Attention`."""

    def __init__(
        self,
        kernel: Kernel,
        num_splits: int | None,
        staged: Mapping[str, Tensor],
        writer: KVWriter,
        longest: tuple[int, int],
    ) -> None:
        """`longest`: an upper bound of the queries, and of the context, of a sequence."""
        self._kernel = kernel
        self._num_splits = num_splits
        self._staged = staged
        self._writer = writer
        self._max_query_len, self._max_context_len = longest

    def plan(self, step: PackedStep, staged: Staged) -> None:
        """All that changes is on the device already."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, window: int | None = None
    ) -> Tensor:
        self._writer.write(layer, key, value)
        cached = self._writer.kv_cache.layer(layer)
        return self._kernel(
            query.to(cached.dtype),
            cached[:, 0],
            cached[:, 1],
            self._staged["query_starts"],
            self._staged["context_starts"],
            self._max_query_len,
            self._max_context_len,
            window_size=(-1 if window is None else window - 1, 0),  # itself not counted
            enable_gqa=True,
            seqused_k=self._staged["context_lens"],
            block_table=self._staged["block_tables"],
            num_splits=self._num_splits,
        ).to(query.dtype)
