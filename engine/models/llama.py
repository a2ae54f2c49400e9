"""Llama 2 and 3, SmolLM2: rotated queries and keys, all tokens in sight."""

from __future__ import annotations

from torch import Tensor

from engine.attention import Attention
from engine.models.causal_lm import CausalLM
from engine.models.decoder import Decoder
from engine.models.layers import Layers, Rotation
from engine.models.self_attention import SelfAttention
from engine.weights import ModelConfig


def llama(config: ModelConfig, layers: Layers) -> CausalLM:
    """https://arxiv.org/abs/2307.09288, https://arxiv.org/abs/2407.21783."""
    return Decoder(config, layers, LlamaAttention)


class LlamaAttention(SelfAttention):
    """See `engine.models.self_attention.SelfAttention`."""

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attention) -> Tensor:
        query, key, value = self.project(x)
        return attend(self.layer, rotation(query), rotation(key), value)
