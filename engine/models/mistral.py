"""Mistral: rotated queries and keys; a token sees only a window of the tokens before it."""

from __future__ import annotations

from torch import Tensor

from engine.attention import Attention
from engine.models.causal_lm import CausalLM
from engine.models.decoder import Decoder
from engine.models.layers import Layers, Rotation
from engine.models.self_attention import SelfAttention
from engine.weights import ModelConfig


def mistral(config: ModelConfig, layers: Layers) -> CausalLM:
    """https://arxiv.org/abs/2310.06825."""
    return Decoder(config, layers, MistralAttention)


class MistralAttention(SelfAttention):
    """See `engine.models.self_attention.SelfAttention`."""

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attention) -> Tensor:
        query, key, value = self.project(x)
        return attend(self.layer, rotation(query), rotation(key), value, window=self.window)
