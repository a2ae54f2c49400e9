"""What `config.json` says about a model, parsed once and valid from then on.

One shape for all families; `engine.weights.known_families` has what each writes in its own way.
Knows nothing of tensors.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.weights.family_json import FamilyJson
from engine.weights.known_families import FAMILIES, architecture_of
from engine.weights.rope_scaling import RopeScaling, YarnScaling
from engine.weights.unsupported import UnsupportedModel
from protocol import ModelError

KNOWN_ARCHITECTURES = tuple(FAMILIES)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shape of a decoder-only model. All sizes count elements.

    `eos_token_ids` is what `config.json` alone says; `ModelFiles.eos_token_ids` is the full set.
    All layers have KV heads of one number and size, so that a KV cache is one array. What only some
    families have comes last, and is left out of the encoding where a model does without: the
    fingerprints of the others do not change when there is something new.
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
    attention_bias: bool  # of queries, keys and values
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    attention_output_bias: bool = False
    qk_norm: bool = False  # heads of queries and keys are normalised before they are rotated
    rope_scaling: RopeScaling | None = None
    rope_free_layers: tuple[int, ...] = ()  # do not rotate
    sliding_window: int | None = None  # tokens that `sliding_layers` see, the last one included
    sliding_layers: tuple[int, ...] = ()

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
            architecture = architecture_of(content)
            return _model_config(
                architecture, msgspec.json.decode(content, type=FAMILIES[architecture])
            )
        except msgspec.MsgspecError as error:
            raise ModelError(f"{path}: {error}", path=str(path)) from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: not UTF-8 text: {error}", path=str(path)) from error
        except UnsupportedModel as error:
            raise ModelError(f"{path}: {error}", path=str(path)) from error

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token holds over all layers.

        `dtype_bytes` is the size of one element.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def window(self, layer: int) -> int | None:
        """How many tokens, itself included, a token sees in this layer; None: all before it."""
        return self.sliding_window if layer in self.sliding_layers else None

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys of this layer are rotated."""
        return layer not in self.rope_free_layers


def _model_config(architecture: str, raw: FamilyJson) -> ModelConfig:
    raw.check()
    scaling = raw.scaling()
    sliding_layers = raw.sliding_layers()
    return ModelConfig(
        architecture=architecture,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_attention_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_kv_heads,
        head_dim=raw.size_of_head(),
        vocab_size=raw.vocab_size,
        max_position_embeddings=_num_positions(raw, scaling),
        rope_theta=raw.theta(),
        rms_norm_eps=raw.rms_norm_eps,
        hidden_act=raw.hidden_act,
        tie_word_embeddings=raw.tie_word_embeddings,
        attention_bias=raw.bias_of_qkv,
        attention_output_bias=raw.bias_of_output,
        mlp_bias=raw.bias_of_mlp,
        bos_token_id=raw.bos_token_id,
        eos_token_ids=as_token_ids(raw.eos_token_id),
        qk_norm=raw.has_qk_norm,
        rope_scaling=scaling,
        rope_free_layers=raw.rope_free_layers(),
        sliding_window=raw.window if sliding_layers else None,
        sliding_layers=sliding_layers,
    )


def _num_positions(raw: FamilyJson, scaling: RopeScaling | None) -> int:
    """Qwen's instructions for longer texts add YaRN and leave `max_position_embeddings` alone."""
    if not isinstance(scaling, YarnScaling):
        return raw.max_position_embeddings
    stretched = int(scaling.factor * scaling.original_max_position_embeddings)
    return max(raw.max_position_embeddings, stretched)


def as_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Hugging Face writes one id as a number, several as a list and none as null."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
