"""SmolLM3: every fourth layer has no positions (NoPE), so that it attends the same far and near."""

from __future__ import annotations

from torch import Tensor

from engine.attention import Attention
from engine.models.causal_lm import CausalLM
from engine.models.decoder import Decoder
from engine.models.layers import Layers, Rotation
from engine.models.self_attention import SelfAttention
from engine.weights import ModelConfig


def smollm3(config: ModelConfig, layers: Layers) -> CausalLM:
    """https://huggingface.co/blog/smollm3, after https://arxiv.org/abs/2501.18795."""
    return Decoder(config, layers, SmolLM3Attention)


class SmolLM3Attention(SelfAttention):
    """See `engine.models.self_attention.SelfAttention`."""

    def __init__(self, layer: int, config: ModelConfig, layers: Layers) -> None:
        super().__init__(layer, config, layers)
        self._rotates = config.rotates(layer)

    def __call__(self, x: Tensor, rotation: Rotation, attend: Attention) -> Tensor:
        query, key, value = self.project(x)
        if self._rotates:
            query, key = rotation(query), rotation(key)
        return attend(self.layer, query, key, value, window=self.window)
