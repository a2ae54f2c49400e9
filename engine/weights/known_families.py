"""`config.json` as each family writes it: its own keys, their defaults, and what they mean.

The names of keys and the defaults are those of Hugging Face. What a family ignores there (a
Llama's `sliding_window`) it ignores here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from engine.weights.family_json import FamilyJson, PositiveInt
from engine.weights.unsupported import UnsupportedModel


class LlamaJson(FamilyJson):
    """Llama 2 and 3, SmolLM2, and what else is written like them."""

    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def bias_of_qkv(self) -> bool:
        return self.attention_bias

    @property
    def bias_of_output(self) -> bool:
        return self.attention_bias

    @property
    def bias_of_mlp(self) -> bool:
        return self.mlp_bias


class MistralJson(FamilyJson):
    """Every layer has the window, if there is one (`null` from version 0.2 on)."""

    num_key_value_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = 4096

    @property
    def window(self) -> int | None:
        return self.sliding_window

    def sliding_layers(self) -> tuple[int, ...]:
        return () if self.sliding_window is None else tuple(range(self.num_hidden_layers))


class Qwen2Json(FamilyJson):
    """Qwen2 and 2.5: q, k and v have a bias; the upper layers may have a window."""

    num_key_value_heads: PositiveInt | None = 32
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] = 28

    @property
    def bias_of_qkv(self) -> bool:
        return True

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def sliding_layers(self) -> tuple[int, ...]:
        if self.window is None:
            return ()
        if self.layer_types is not None:
            return tuple(self.named_sliding())
        return tuple(range(self.max_window_layers, self.num_hidden_layers))


class Qwen3Json(Qwen2Json):
    """Queries and keys are normalised head by head, and a head is as large as it wants."""

    head_dim: PositiveInt | None = 128
    attention_bias: bool = False

    @property
    def bias_of_qkv(self) -> bool:
        return self.attention_bias

    @property
    def bias_of_output(self) -> bool:
        return self.attention_bias

    @property
    def has_qk_norm(self) -> bool:
        return True


class SmolLM3Json(LlamaJson):
    """Every fourth layer, or those that `no_rope_layers` marks with 0, do not rotate."""

    num_key_value_heads: PositiveInt | None = 4
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: PositiveInt = 4

    @property
    def default_theta(self) -> float:
        return 2_000_000.0

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def sliding_layers(self) -> tuple[int, ...]:
        if self.window is None:
            return ()
        return self.rope_free_layers() if self.layer_types is None else tuple(self.named_sliding())

    def rope_free_layers(self) -> tuple[int, ...]:
        layers, interval = range(self.num_hidden_layers), self.no_rope_layer_interval
        if self.no_rope_layers is None:
            return tuple(layer for layer in layers if (layer + 1) % interval == 0)
        if len(self.no_rope_layers) < self.num_hidden_layers:
            raise UnsupportedModel(
                f"no_rope_layers has {len(self.no_rope_layers)} entries, fewer than"
                f" num_hidden_layers ({self.num_hidden_layers})"
            )
        return tuple(layer for layer in layers if not self.no_rope_layers[layer])


class _Kind(msgspec.Struct):
    architectures: list[str] | None = None
    model_type: str | None = None


FAMILIES: Mapping[str, type[FamilyJson]] = {
    "LlamaForCausalLM": LlamaJson,
    "MistralForCausalLM": MistralJson,
    "Qwen2ForCausalLM": Qwen2Json,
    "Qwen3ForCausalLM": Qwen3Json,
    "SmolLM3ForCausalLM": SmolLM3Json,
}

_ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def architecture_of(content: bytes) -> str:
    """The architecture that a `config.json` names, or else the one of its `model_type`.

    Raises UnsupportedModel, which lists the known ones, and msgspec's errors.
    """
    kind = msgspec.json.decode(content, type=_Kind)
    for architecture in kind.architectures or [_of_model_type(kind.model_type)]:
        if architecture in FAMILIES:
            return architecture
    said = ", ".join(kind.architectures or []) or f"model_type {kind.model_type!r}"
    raise UnsupportedModel(f"unknown architecture {said}; known: {', '.join(FAMILIES)}")


def _of_model_type(model_type: str | None) -> str:
    return _ARCHITECTURE_OF_MODEL_TYPE.get(model_type or "", "")
