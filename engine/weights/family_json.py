"""The keys of `config.json` that all families have, with Hugging Face's names and defaults."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from engine.weights.rope_scaling import RopeScaling, parse_rope_scaling
from engine.weights.unsupported import UnsupportedModel

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

_FULL, _SLIDING = "full_attention", "sliding_attention"


class FamilyJson(msgspec.Struct):
    """What all families have in common; what would silently change the numbers is refused."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    original_max_position_embeddings: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: str = "silu"
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    layer_types: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None

    # What a family may decide for itself.

    @property
    def default_theta(self) -> float:
        return 10000.0

    @property
    def bias_of_qkv(self) -> bool:
        return False

    @property
    def bias_of_output(self) -> bool:
        return False

    @property
    def bias_of_mlp(self) -> bool:
        return False

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head of queries and keys is normalised before it is rotated."""
        return False

    @property
    def window(self) -> int | None:
        """What a layer with a sliding window sees, in tokens."""
        return None

    def sliding_layers(self) -> tuple[int, ...]:
        """The layers that see `window` tokens only."""
        return ()

    def rope_free_layers(self) -> tuple[int, ...]:
        """The layers that do not rotate."""
        return ()

    # What all of them do alike.

    def check(self) -> None:
        """Raises UnsupportedModel for what the engine would compute wrongly."""
        if self.hidden_act != "silu":
            raise UnsupportedModel(f"hidden_act {self.hidden_act!r} is not supported; known: silu")
        if self.quantization_config is not None:
            method = self.quantization_config.get("quant_method", "unknown")
            raise UnsupportedModel(
                f"quantization_config ({method}): quantised safetensors are not supported; use a"
                " GGUF file, or weights in float32, float16 or bfloat16"
            )
        if self.num_attention_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of"
                f" num_key_value_heads ({self.num_kv_heads})"
            )
        self._check_layer_types()

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def size_of_head(self) -> int:
        """Raises UnsupportedModel: not given and not implied, or odd."""
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UnsupportedModel(
                f"head_dim is missing and hidden_size ({self.hidden_size}) is not a multiple of"
                f" num_attention_heads ({self.num_attention_heads})"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim ({head_dim}) must be even for rotary embeddings")
        return head_dim

    @property
    def _rope(self) -> dict[str, Any]:
        """`rope_parameters` is how transformers 5 writes it, `rope_scaling` how it was before."""
        return self.rope_scaling or self.rope_parameters or {}

    def theta(self) -> float:
        theta = self._rope.get("rope_theta", self.rope_theta)
        return self.default_theta if theta is None else msgspec.convert(theta, PositiveFloat)

    def scaling(self) -> RopeScaling | None:
        """Raises UnsupportedModel as `parse_rope_scaling` does."""
        return parse_rope_scaling(
            {"partial_rotary_factor": self.partial_rotary_factor} | self._rope,
            head_dim=self.size_of_head(),
            max_position_embeddings=self.max_position_embeddings,
            original_max_position_embeddings=self.original_max_position_embeddings,
        )

    def _check_layer_types(self) -> None:
        types = self.layer_types
        if types is None:
            return
        for kind in types:
            if kind not in (_FULL, _SLIDING):
                raise UnsupportedModel(
                    f"layer_types names {kind!r}, which is not supported; known: {_FULL},"
                    f" {_SLIDING}"
                )
        if len(types) != self.num_hidden_layers:
            raise UnsupportedModel(
                f"layer_types has {len(types)} entries for num_hidden_layers"
                f" ({self.num_hidden_layers})"
            )
        if tuple(self.named_sliding()) != self.sliding_layers():
            raise UnsupportedModel(
                f"layer_types names {_SLIDING} for layers {self.named_sliding()}, but by the other"
                f" keys it is layers {list(self.sliding_layers())} that have a sliding window"
            )

    def named_sliding(self) -> list[int]:
        """The layers that `layer_types` gives a sliding window."""
        return [layer for layer, kind in enumerate(self.layer_types or ()) if kind == _SLIDING]
