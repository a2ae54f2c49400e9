"""Qwen2 and 2.5: q, k and v are projected with a bias; some layers may have a window.

Both are in the config, so the forward pass is Mistral's.
"""

from __future__ import annotations

from engine.models.causal_lm import CausalLM
from engine.models.decoder import Decoder
from engine.models.layers import Layers
from engine.models.mistral import MistralAttention
from engine.weights import ModelConfig


def qwen2(config: ModelConfig, layers: Layers) -> CausalLM:
    """https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2412.15115."""
    return Decoder(config, layers, MistralAttention)
