"""How rotary frequencies are changed so that a model can read longer texts than it learned from.

Knows the kinds that the engine can compute, and how `config.json` writes them; their formulas are
in `engine.models.rotary`. A kind whose frequencies depend on the length of the text (`dynamic`,
most of `longrope`) is refused: keys stay in the cache as they were rotated.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from engine.weights.unsupported import UnsupportedModel

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

KNOWN_ROPE_TYPES = ("default", "linear", "llama3", "longrope", "yarn")


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, tag="linear"):
    """Positions are divided by `factor` (https://arxiv.org/abs/2306.15595)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, tag="llama3"):
    """Long waves are stretched by `factor`, short ones stay, and those between are blended.

    Source: Llama 3.1's reference code, `apply_scaling`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, tag="yarn"):
    """YaRN (https://arxiv.org/abs/2309.00071): blends by the number of turns in the old context.

    `attention_factor` scales cosine and sine, and so makes attention sharper.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


class FrequencyDivisors(msgspec.Struct, frozen=True, kw_only=True, tag="divisors"):
    """Frequency i is divided by `divisors[i]`: LongRoPE whose short and long factors are the same,
    and what a GGUF file has in `rope_freqs.weight`."""

    divisors: tuple[float, ...]  # head_dim / 2 of them
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


def parse_rope_scaling(
    rope: dict[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    original_max_position_embeddings: int | None = None,
) -> RopeScaling | None:
    """What `rope_scaling` or `rope_parameters` of a `config.json` says; None for plain rope.

    `original_max_position_embeddings`, if given beside it, goes before the one in it, and
    `max_position_embeddings` stands in if there is neither. Raises UnsupportedModel: a kind that is
    not known, or a key that its kind does not have.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _PARSERS:
        raise UnsupportedModel(
            f"rope_type {kind!r} is not supported; known: {', '.join(KNOWN_ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModel(
            "partial rotary embeddings are not supported: partial_rotary_factor is"
            f" {rope['partial_rotary_factor']!r}, not 1.0"
        )
    own = {key: value for key, value in rope.items() if key not in _COMMON_KEYS}
    if original_max_position_embeddings is not None and kind in _WITH_ORIGINAL:
        own["original_max_position_embeddings"] = original_max_position_embeddings
    try:
        return _PARSERS[kind](own, head_dim, max_position_embeddings)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"rope_type {kind!r}: {error}") from error


_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_WITH_ORIGINAL = {"llama3", "longrope", "yarn"}


class _NoKeys(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _LinearJson(msgspec.Struct, forbid_unknown_fields=True):
    factor: PositiveFloat


class _Llama3Json(msgspec.Struct, forbid_unknown_fields=True):
    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt | None = None


class _YarnJson(msgspec.Struct, forbid_unknown_fields=True):
    factor: PositiveFloat | None  # null: by how much the new context exceeds the old one
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    finetuned: bool | None = None  # in old files; says nothing about the frequencies


class _LongRopeJson(msgspec.Struct, forbid_unknown_fields=True):
    short_factor: list[PositiveFloat]
    long_factor: list[PositiveFloat]
    factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: PositiveFloat | None = None


def _plain(own: dict[str, Any], _head_dim: int, _max_positions: int) -> None:
    msgspec.convert(own, _NoKeys)


def _linear(own: dict[str, Any], _head_dim: int, _max_positions: int) -> LinearScaling:
    return LinearScaling(factor=msgspec.convert(own, _LinearJson).factor)


def _llama3(own: dict[str, Any], _head_dim: int, max_positions: int) -> Llama3Scaling:
    raw = msgspec.convert(own, _Llama3Json)
    if raw.low_freq_factor >= raw.high_freq_factor:
        raise UnsupportedModel(
            f"rope_type 'llama3': low_freq_factor ({raw.low_freq_factor}) must be less than"
            f" high_freq_factor ({raw.high_freq_factor})"
        )
    return Llama3Scaling(
        factor=raw.factor,
        low_freq_factor=raw.low_freq_factor,
        high_freq_factor=raw.high_freq_factor,
        original_max_position_embeddings=raw.original_max_position_embeddings or max_positions,
    )


def _yarn(own: dict[str, Any], _head_dim: int, max_positions: int) -> YarnScaling:
    raw = msgspec.convert(own, _YarnJson)
    original = raw.original_max_position_embeddings or max_positions
    factor = raw.factor or max_positions / original
    beta_fast, beta_slow = raw.beta_fast or 32.0, raw.beta_slow or 1.0
    if beta_slow >= beta_fast:
        raise UnsupportedModel(
            f"rope_type 'yarn': beta_slow ({beta_slow}) must be less than beta_fast ({beta_fast})"
        )
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=raw.attention_factor or _yarn_attention_factor(raw, factor),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=raw.truncate,
    )


def _yarn_attention_factor(raw: _YarnJson, factor: float) -> float:
    """Equation 22 of the paper, or DeepSeek's quotient of two such factors."""

    def sharpness(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if raw.mscale and raw.mscale_all_dim:
        return sharpness(raw.mscale) / sharpness(raw.mscale_all_dim)
    return sharpness(1.0)


def _longrope(own: dict[str, Any], head_dim: int, max_positions: int) -> FrequencyDivisors:
    raw = msgspec.convert(own, _LongRopeJson)
    if raw.short_factor != raw.long_factor:
        raise UnsupportedModel(
            "rope_type 'longrope' is supported only where short_factor equals long_factor:"
            " otherwise keys change with the length of the text, and cannot stay in a cache"
        )
    if len(raw.short_factor) != head_dim // 2:
        raise UnsupportedModel(
            f"rope_type 'longrope': short_factor has {len(raw.short_factor)} numbers, but head_dim"
            f" ({head_dim}) asks for {head_dim // 2}"
        )
    original = raw.original_max_position_embeddings or max_positions
    factor = raw.factor or max_positions / original
    return FrequencyDivisors(
        divisors=tuple(raw.short_factor),
        attention_factor=raw.attention_factor or _longrope_attention_factor(factor, original),
    )


def _longrope_attention_factor(factor: float, original: int) -> float:
    """Section 3.3 of https://arxiv.org/abs/2402.13753."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


_PARSERS = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
