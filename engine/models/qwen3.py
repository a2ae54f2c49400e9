"""Qwen3: each head of queries and keys is normalised before it is rotated."""

from __future__ import annotations

from torch import Tensor

from engine.attention import Attention
from engine.models.causal_lm import CausalLM
from engine.models.decoder import Decoder
from engine.models.layers import Layers, Rotation
from engine.models.self_attention import SelfAttention
from engine.weights import ModelConfig


def qwen3(config: ModelConfig, layers: Layers) -> CausalLM:
    """https://arxiv.org/abs/2505.09388."""
    return Decoder(config, layers, Qwen3Attention)


class Qwen3Attention(SelfAttention):
    """See `engine.models.self_attention.SelfAttention`."""

    def __init__(self, layer: int, config: ModelConfig, layers: Layers) -> None:
        super().__init__(layer, config, layers)
        self._query_norm = layers.rms_norm(f"{self.name}.q_norm", config.rms_norm_eps)
        self._key_norm = layers.rms_norm(f"{self.name}.k_norm", config.rms_norm_eps)

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attention) -> Tensor:
        query, key, value = self.project(x)
        query, key = rotation(self._query_norm(query)), rotation(self._key_norm(key))
        return attend(self.layer, query, key, value, window=self.window)
