"""What `config.json` says about a model, parsed once and valid from then on.

Knows the architectures that the engine can run and refuses everything that would silently change
the numbers (another rope, another activation, quantised weights). Knows nothing of tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from protocol import ModelError

KNOWN_ARCHITECTURES = ("LlamaForCausalLM",)

_ARCHITECTURE_OF_MODEL_TYPE = {"llama": "LlamaForCausalLM"}

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only model. All sizes count elements.

    `eos_token_ids` is what `config.json` alone says; `ModelFiles.eos_token_ids` is the full set.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Parse the `config.json` at `path`.

        Raises ModelError: missing, not JSON, a field missing or of the wrong type, or a model that
        the engine cannot run.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> ModelConfig:
        """Parse the bytes of a `config.json`; `path` only names them in errors.

        Raises ModelError as `load` does.
        """
        try:
            architecture = _architecture(msgspec.json.decode(content, type=_Kind))
            raw = msgspec.json.decode(content, type=_LlamaJson)
            return _from_llama(architecture, raw)
        except msgspec.MsgspecError as error:
            raise ModelError(f"{path}: {error}", path=str(path)) from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: not UTF-8 text: {error}", path=str(path)) from error
        except _Unsupported as error:
            raise ModelError(f"{path}: {error}", path=str(path)) from error

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token holds over all layers.

        `dtype_bytes` is the size of one element.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


class _Unsupported(ValueError):
    """Well-formed, but a model that the engine would compute wrongly."""


class _Kind(msgspec.Struct):
    architectures: list[str] | None = None
    model_type: str | None = None


class _LlamaJson(msgspec.Struct):
    """The keys of `config.json` that matter, as Hugging Face spells them, with its defaults."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: str = "silu"
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


def _architecture(kind: _Kind) -> str:
    named = kind.architectures or [_ARCHITECTURE_OF_MODEL_TYPE.get(kind.model_type or "", "")]
    for architecture in named:
        if architecture in KNOWN_ARCHITECTURES:
            return architecture
    said = ", ".join(kind.architectures or []) or f"model_type {kind.model_type!r}"
    raise _Unsupported(f"unknown architecture {said}; known: {', '.join(KNOWN_ARCHITECTURES)}")


def _from_llama(architecture: str, raw: _LlamaJson) -> ModelConfig:
    if raw.hidden_act != "silu":
        raise _Unsupported(f"hidden_act {raw.hidden_act!r} is not supported, only 'silu'")
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method", "unknown")
        raise _Unsupported(f"quantised weights ({method}) are not supported; use a GGUF file")
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise _Unsupported(
            f"num_attention_heads ({raw.num_attention_heads}) is not a multiple of"
            f" num_key_value_heads ({num_kv_heads})"
        )
    return ModelConfig(
        architecture=architecture,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_attention_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw),
        vocab_size=raw.vocab_size,
        max_position_embeddings=raw.max_position_embeddings,
        rope_theta=_rope_theta(raw),
        rms_norm_eps=raw.rms_norm_eps,
        hidden_act=raw.hidden_act,
        tie_word_embeddings=raw.tie_word_embeddings,
        attention_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias,
        bos_token_id=raw.bos_token_id,
        eos_token_ids=as_token_ids(raw.eos_token_id),
    )


def _head_dim(raw: _LlamaJson) -> int:
    if raw.head_dim is None and raw.hidden_size % raw.num_attention_heads:
        raise _Unsupported(
            f"head_dim is missing and hidden_size ({raw.hidden_size}) is not a multiple of"
            f" num_attention_heads ({raw.num_attention_heads})"
        )
    head_dim = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    if head_dim % 2:
        raise _Unsupported(f"head_dim ({head_dim}) must be even for rotary embeddings")
    return head_dim


def _rope_theta(raw: _LlamaJson) -> float:
    """`rope_parameters` is how transformers 5 writes it, the other two how it was before."""
    rope = raw.rope_parameters or raw.rope_scaling or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise _Unsupported(f"rope scaling of type {kind!r} is not supported, only 'default'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _Unsupported("partial rotary embeddings are not supported")
    theta = rope.get("rope_theta", raw.rope_theta)
    return 10000.0 if theta is None else msgspec.convert(theta, PositiveFloat)


def as_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Hugging Face writes one id as a number, several as a list and none as null."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
