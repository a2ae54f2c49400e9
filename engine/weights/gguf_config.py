"""What a GGUF file's metadata says about the model, as Hugging Face's `config.json`.

Knows which architectures of llama.cpp are which families, and refuses metadata that would change
the numbers. Source of keys and defaults: llama.cpp's `llama-model.cpp`, `llama-context.cpp` and
converters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.weights.gguf_file import GGUFFile
from engine.weights.gguf_tokenizer import GGUFTokenizer

Json = dict[str, Any]

ROPE_DIVISORS = "rope_freqs.weight"  # the one tensor that belongs to the config

_DEFAULT_ROPE_THETA = 10000.0
_SMOLLM3_ROPE_INTERVAL = 4  # llama.cpp knows it by heart; no file says it

# Each of them would have to be computed, so a file may have them only as 0 or not at all.
_UNSUPPORTED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.yarn_attn_factor",  # of two meanings, depending on who wrote it
    "rope.scaling.yarn_log_multiplier",
)


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """What Hugging Face calls an architecture of llama.cpp, and what llama.cpp does to it."""

    architecture: str
    model_type: str
    permutes_rows: bool  # of q and k, see `engine.weights.gguf`


GGUF_FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", permutes_rows=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2", permutes_rows=False),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3", permutes_rows=False),
    "smollm3": GGUFFamily("SmolLM3ForCausalLM", "smollm3", permutes_rows=True),
}


def family_of(file: GGUFFile) -> GGUFFamily:
    """Raises ModelError for an unknown architecture, and lists the known ones."""
    architecture = file.require("general.architecture", str)
    if architecture not in GGUF_FAMILIES:
        raise file.broken(
            f"unknown architecture {architecture!r}; known: {', '.join(GGUF_FAMILIES)}"
        )
    return GGUF_FAMILIES[architecture]


class GGUFConfig:
    """Reads the metadata of the file's own architecture: `llama.block_count` is `block_count`."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises ModelError: an unknown architecture, one part of several, an unsupported key."""
        self.family = family_of(file)
        self._file = file
        self._prefix = file.require("general.architecture", str)
        self._check()

    def config_json(self, tokenizer: GGUFTokenizer) -> Json:
        """The content of `config.json`. Raises ModelError: metadata missing, or not supported."""
        file, key = self._file, self._key
        num_heads = file.require(key("attention.head_count"), int)
        hidden_size = file.require(key("embedding_length"), int)
        if num_heads < 1:
            raise file.broken(f"{key('attention.head_count')} is {num_heads}")
        head_dim = file.get(key("attention.key_length"), int) or hidden_size // num_heads
        self._check_head_dim(head_dim)
        eps = file.require(key("attention.layer_norm_rms_epsilon"), float)
        return {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "hidden_size": hidden_size,
            "intermediate_size": file.require(key("feed_forward_length"), int),
            "num_hidden_layers": file.require(key("block_count"), int),
            "num_attention_heads": num_heads,
            "num_key_value_heads": file.get(key("attention.head_count_kv"), int) or num_heads,
            "head_dim": head_dim,
            "vocab_size": len(tokenizer.tokens),
            "max_position_embeddings": file.require(key("context_length"), int),
            "rms_norm_eps": _decimal(eps),
            "hidden_act": "silu",
            "rope_theta": self._rope_theta(),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
            "torch_dtype": "float32",
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": one_or_many(tokenizer.eos_token_ids),
        } | self._what_only_some_have(head_dim)

    def _key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def _check(self) -> None:
        file = self._file
        if (file.get("split.count", int) or 1) > 1:
            raise file.broken("is one part of several; merge them with `llama-gguf-split --merge`")
        if file.get(self._key("expert_count"), int):
            raise file.broken("is a mixture of experts, which is not supported")
        for name in _UNSUPPORTED:
            if value := file.metadata.get(self._key(name)):
                raise file.broken(f"{self._key(name)} is {value!r}, which is not supported")

    def _check_head_dim(self, head_dim: int) -> None:
        rotated = self._file.get(self._key("rope.dimension_count"), int) or head_dim
        if rotated != head_dim:
            raise self._file.broken(
                f"rotates {rotated} of {head_dim} dimensions, which is not supported"
            )
        of_values = self._file.get(self._key("attention.value_length"), int) or head_dim
        if of_values != head_dim:
            raise self._file.broken(
                f"has values of {of_values} dimensions and keys of {head_dim}, which is not"
                " supported"
            )

    def _what_only_some_have(self, head_dim: int) -> Json:
        own: Json = {}
        if scaling := self._rope_scaling(head_dim):
            own["rope_scaling"] = scaling
        if self.family.model_type == "smollm3":
            own["no_rope_layer_interval"] = _SMOLLM3_ROPE_INTERVAL
        return own | self._sliding_window()

    def _sliding_window(self) -> Json:
        """llama.cpp writes a Mistral as a `llama`; with a window it becomes a Mistral again.

        Of other families no file says which layers have the window.
        """
        window = self._file.get(self._key("attention.sliding_window"), int)
        if not window:
            return {}
        if self.family.model_type == "llama":
            return {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": window,
            }
        if window < self._file.require(self._key("context_length"), int):
            raise self._file.broken(
                f"{self._key('attention.sliding_window')} is {window}, but which layers have that"
                " window a file does not say; use the model's Hugging Face directory"
            )
        return {}

    def _rope_theta(self) -> float:
        return _decimal(self._file.get(self._key("rope.freq_base"), float) or _DEFAULT_ROPE_THETA)

    def _rope_scaling(self, head_dim: int) -> Json | None:
        """Where a file gives a factor and no type, it means `linear`."""
        factor = self._file.get(self._key("rope.scaling.factor"), float)
        factor = factor or self._file.get(self._key("rope.scale_linear"), float)
        kind = self._file.get(self._key("rope.scaling.type"), str)
        kind = kind or ("linear" if factor else "none")
        if ROPE_DIVISORS in self._file.tensors:
            return self._divisors(kind, head_dim)
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": _decimal(self._factor(kind, factor))}
        if kind == "yarn":
            return self._yarn(self._factor(kind, factor))
        raise self._file.broken(
            f"{self._key('rope.scaling.type')} {kind!r} is not supported; known: none, linear, yarn"
        )

    def _factor(self, kind: str, factor: float | None) -> float:
        if not factor:
            raise self._file.broken(
                f"metadata {self._key('rope.scaling.factor')} is missing, which {kind!r} needs"
            )
        return factor

    def _yarn(self, factor: float) -> Json:
        """llama.cpp multiplies YaRN's own attention factor with the one in the file."""
        get, key = self._file.get, self._key
        extrapolation = get(key("rope.scaling.yarn_ext_factor"), float)
        if extrapolation not in (None, 1.0):
            raise self._file.broken(
                f"{key('rope.scaling.yarn_ext_factor')} is {extrapolation}, which is not supported"
            )
        optional = {
            "original_max_position_embeddings": get(
                key("rope.scaling.original_context_length"), int
            ),
            "beta_fast": get(key("rope.scaling.yarn_beta_fast"), float),
            "beta_slow": get(key("rope.scaling.yarn_beta_slow"), float),
        }
        attention = get(key("rope.scaling.attn_factor"), float)
        if attention:
            optional["attention_factor"] = attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        given = {name: value for name, value in optional.items() if value is not None}
        return {"rope_type": "yarn", "factor": _decimal(factor)} | given

    def _divisors(self, kind: str, head_dim: int) -> Json:
        """Llama 3's scaling as llama.cpp keeps it: not the rule, but the divisor of each frequency.

        Hugging Face has LongRoPE for that.
        """
        if kind != "none":
            raise self._file.broken(f"has {ROPE_DIVISORS} beside rope scaling of type {kind!r}")
        tensor = self._file.tensors[ROPE_DIVISORS]
        if tensor.shape != (head_dim // 2,):
            raise self._file.broken(
                f"tensor {ROPE_DIVISORS} has shape {list(tensor.shape)}, but its metadata says"
                f" {[head_dim // 2]}"
            )
        divisors = [float(number) for number in self._file.dequantize(tensor)]
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
        }


def one_or_many(ids: tuple[int, ...]) -> int | list[int] | None:
    """As Hugging Face writes token ids: one as a number, several as a list and none as null."""
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def _decimal(value: float) -> float:
    """GGUF stores float32: 1e-05 comes back as 9.999999747378752e-06. Give the shortest again."""
    return float(str(np.float32(value)))
