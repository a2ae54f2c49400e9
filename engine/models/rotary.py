"""The frequencies that positions are rotated with, for each kind of rope scaling.

All in float32 and in the order of operations of the models' reference code, so that angles of
positions far out agree with it too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.layers import Layers, RotaryEmbedding
from engine.weights import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    YarnScaling,
)


def rotary_embedding(config: ModelConfig, layers: Layers) -> RotaryEmbedding:
    """The rotary embedding of a model, scaled as its config says."""
    waves = _waves(config)
    match config.rope_scaling:
        case None:
            return layers.rotary(1.0 / waves)
        case LinearScaling() as linear:
            return layers.rotary(1.0 / waves / linear.factor)
        case Llama3Scaling() as llama3:
            return layers.rotary(_llama3(llama3, waves))
        case YarnScaling() as yarn:
            return layers.rotary(_yarn(yarn, waves, config), yarn.attention_factor)
        case FrequencyDivisors() as table:
            divisors = torch.tensor(table.divisors, dtype=torch.float32)
            return layers.rotary(1.0 / (divisors * waves), table.attention_factor)


def _waves(config: ModelConfig) -> Tensor:
    """θ^(2i/d) `[head_dim / 2]`: in how many positions pair i turns by one radian."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return config.rope_theta**exponents


def _llama3(scaling: Llama3Scaling, waves: Tensor) -> Tensor:
    """Pairs that turn `high` times or more in the old context stay as they are, those that turn
    `low` times or less are stretched, and those between are blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    frequencies = 1.0 / waves
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(scaling: YarnScaling, waves: Tensor, config: ModelConfig) -> Tensor:
    """Section 3.2 of https://arxiv.org/abs/2309.00071, with the blend linear in the pair's number.

    It goes from the pair that turns `beta_fast` times in the old context, which stays, to the one
    that turns `beta_slow` times, which is stretched.
    """

    def pair_that_turns(times: float) -> float:
        wave = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return config.head_dim * math.log(wave) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float32)
    stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return stretched / (scaling.factor * waves) + (1.0 - stretched) / waves
