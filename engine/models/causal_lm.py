"""The seam between the model runner and models."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.attention.attention import Attention
from engine.weights import ModelConfig


class CausalLM(Protocol):
    """A decoder-only model. It has no state but its weights, so several runners may share one."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Packed tokens `[num_tokens]` → their last hidden states `[num_tokens, hidden_size]`.

        `wanted`: the rows that are of interest, by default all. The last layer computes no others
        than these once their keys and values are known.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of what `forward` returned → `[num_rows, vocab_size]` in float32."""
