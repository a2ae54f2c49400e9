"""What the attention of all families has in common: where queries, keys and values come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from engine.attention import Attention
from engine.models.layers import Layers, Rotation
from engine.weights import ModelConfig


class AttentionFactory(Protocol):
    """How a family makes the attention of one layer: its class."""

    def __call__(self, layer: int, config: ModelConfig, layers: Layers) -> SelfAttention: ...


class SelfAttention(ABC):
    """Grouped-query attention (https://arxiv.org/abs/2305.13245) of one layer.

    A family says in `__call__` what happens to queries and keys before they meet.
    """

    def __init__(self, layer: int, config: ModelConfig, layers: Layers) -> None:
        self.layer = layer
        self.window = config.window(layer)  # tokens that a token sees, itself included; None: all
        self._head_dim = config.head_dim
        self._num_heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        self.name = f"model.layers.{layer}.self_attn"
        q, k, v = (f"{self.name}.{name}_proj" for name in "qkv")
        self._qkv = layers.linear(q, k, v, bias=config.attention_bias)
        self._output = layers.linear(f"{self.name}.o_proj", bias=config.attention_output_bias)

    @abstractmethod
    def __call__(self, x: Tensor, rotation: Rotation, attend: Attention) -> Tensor:
        """`[num_tokens, hidden_size]` → `[num_tokens, num_heads, head_dim]`, one sum a head."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each `[num_tokens, its number of heads, head_dim]`.

        They are parts of one tensor.
        """
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._num_heads, dim=1)
        return query, key, value

    def output(self, heads: Tensor, residual: Tensor) -> Tensor:
        """The heads' sums brought back to `[num_tokens, hidden_size]`, plus the residual."""
        return self._output(heads.flatten(1), residual)
