"""Models of a few kilobytes, made on the spot: a GGUF file and a Hugging Face directory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from safetensors.numpy import save_file

# Rows of 256 so that every quantisation has whole blocks.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 266,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

QWEN2 = CONFIG | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
SMOLLM3 = CONFIG | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "num_hidden_layers": 5,
}

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ", "ĠĠ ĠĠ", "1 2"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The characters of byte-level BPE in the order of the bytes, spelled out on its own here."""
    alphabet, next_other = [], 0x100
    for byte in range(256):
        if chr(byte).isprintable() and not chr(byte).isspace() and byte != 0xAD:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(next_other))
            next_other += 1
    return alphabet


def vocabulary() -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIAL_TOKENS, *byte_alphabet(), *merged, "<think>"]


@dataclass
class TinyGGUF:
    """A GGUF file of the shape of CONFIG, to be spoiled in one place and written."""

    metadata: dict[str, tuple[Any, Kind]] = field(default_factory=lambda: _metadata(CONFIG))
    tensors: dict[str, tuple[np.ndarray, Type]] = field(
        default_factory=lambda: gguf_tensors(hf_tensors(), CONFIG)
    )
    architecture: str = "llama"

    @classmethod
    def of(cls, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> TinyGGUF:
        """The file that llama.cpp makes of this model."""
        weights = hf_tensors(config) if tensors is None else tensors
        return cls(_metadata(config), gguf_tensors(weights, config), config["model_type"])

    def quantize(self, kind: Type, seed: int = 0) -> None:
        """Give every matrix this type, with arbitrary blocks."""
        rng = np.random.default_rng(seed)
        for name, (values, _) in self.tensors.items():
            if values.ndim == 2:
                self.tensors[name] = (random_blocks(rng, values.shape, kind), kind)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, (value, kind) in self.metadata.items():
            writer.add_key_value(key, value, kind, _item_kind(value))
        for name, (values, type_) in self.tensors.items():
            raw_type = None if type_ in (Type.F32, Type.F16) else type_
            writer.add_tensor(name, values, raw_dtype=raw_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Raw bytes of this type, none of them so large that a half-precision scale would be NaN."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = shape[-1] // block_size * block_bytes
    if kind == Type.F32:
        return rng.standard_normal(shape).astype(np.float32)
    if kind == Type.F16:
        return rng.standard_normal(shape).astype(np.float16)
    return rng.integers(0, 0x38, size=(*shape[:-1], columns), dtype=np.uint8)


def hf_tensors(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face names, spelled out on their own here."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (q_size, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_size, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_size, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q_size),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen2":
            shapes |= {
                f"{prefix}.self_attn.q_proj.bias": (q_size,),
                f"{prefix}.self_attn.k_proj.bias": (kv_size,),
                f"{prefix}.self_attn.v_proj.bias": (kv_size,),
            }
        if config["model_type"] == "qwen3":
            shapes |= {
                f"{prefix}.self_attn.q_norm.weight": (config["head_dim"],),
                f"{prefix}.self_attn.k_norm.weight": (config["head_dim"],),
            }
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def write_hf_directory(
    directory: Path,
    config: dict[str, Any] = CONFIG,
    tensors: dict[str, np.ndarray] | None = None,
    num_shards: int = 1,
) -> Path:
    """A complete directory, its weights in one file or in several with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = hf_tensors(config) if tensors is None else tensors
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer.json", tokenizer_json())
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    per_shard = math.ceil(len(tensors) / num_shards)
    for shard in range(num_shards):
        names = list(tensors)[shard * per_shard : (shard + 1) * per_shard]
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return directory


def tokenizer_json() -> dict[str, Any]:
    """Byte-level BPE over `vocabulary()`."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "added_tokens": [_added(i, token) for i, token in enumerate(SPECIAL_TOKENS)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(vocabulary())},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def _added(token_id: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": True, **flags}


def _metadata(config: dict[str, Any]) -> dict[str, tuple[Any, Kind]]:
    arch = config["model_type"]
    return {
        f"{arch}.block_count": (config["num_hidden_layers"], Kind.UINT32),
        f"{arch}.context_length": (config["max_position_embeddings"], Kind.UINT32),
        f"{arch}.embedding_length": (config["hidden_size"], Kind.UINT32),
        f"{arch}.feed_forward_length": (config["intermediate_size"], Kind.UINT32),
        f"{arch}.attention.head_count": (config["num_attention_heads"], Kind.UINT32),
        f"{arch}.attention.head_count_kv": (config["num_key_value_heads"], Kind.UINT32),
        f"{arch}.attention.layer_norm_rms_epsilon": (config["rms_norm_eps"], Kind.FLOAT32),
        f"{arch}.rope.freq_base": (config["rope_theta"], Kind.FLOAT32),
        **_head_size(config),
        "tokenizer.ggml.model": ("gpt2", Kind.STRING),
        "tokenizer.ggml.pre": ("smollm", Kind.STRING),
        "tokenizer.ggml.tokens": (vocabulary(), Kind.ARRAY),
        "tokenizer.ggml.token_type": ([3, 3, 3] + [1] * 262 + [4], Kind.ARRAY),
        "tokenizer.ggml.merges": (MERGES, Kind.ARRAY),
        "tokenizer.ggml.bos_token_id": (1, Kind.UINT32),
        "tokenizer.ggml.eos_token_id": (2, Kind.UINT32),
        "tokenizer.ggml.unknown_token_id": (0, Kind.UINT32),
        "tokenizer.ggml.add_bos_token": (False, Kind.BOOL),
        "tokenizer.chat_template": (CHAT_TEMPLATE, Kind.STRING),
    }


def _head_size(config: dict[str, Any]) -> dict[str, tuple[Any, Kind]]:
    """Those that came from Llama say how much of a head is rotated, Qwen3 says how large it is."""
    arch, head_dim = config["model_type"], config["head_dim"]
    keys = {
        "llama": ["rope.dimension_count"],
        "smollm3": ["rope.dimension_count"],
        "qwen3": ["attention.key_length", "attention.value_length"],
    }
    return {f"{arch}.{key}": (head_dim, Kind.UINT32) for key in keys.get(arch, [])}


def _item_kind(value: Any) -> Kind | None:
    if not isinstance(value, list):
        return None
    return {int: Kind.INT32, float: Kind.FLOAT32, str: Kind.STRING}[type(value[0])]


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` → `blk.0.ffn_up.weight`."""
    if name.startswith("model.layers."):
        _, _, layer, *part, leaf = name.split(".")
        return f"blk.{layer}.{_GGUF_PARTS['.'.join(part)]}.{leaf}"
    name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
    return name.replace("lm_head", "output")


def llama_cpp_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of q or k as llama.cpp writes them, one row at a time: pair i becomes 2i, 2i + 1."""
    head_dim = len(rows) // num_heads
    permuted = np.empty_like(rows)
    for head in range(num_heads):
        for row in range(head_dim):
            half, pair = divmod(row, head_dim // 2)
            permuted[head * head_dim + 2 * pair + half] = rows[head * head_dim + row]
    return permuted


def gguf_tensors(
    hf: dict[str, np.ndarray], config: dict[str, Any]
) -> dict[str, tuple[np.ndarray, Type]]:
    """The tensors as llama.cpp would write them in float32; a Qwen's it leaves in their order."""
    tensors: dict[str, tuple[np.ndarray, Type]] = {}
    for name, values in hf.items():
        if config["model_type"] in ("llama", "smollm3"):
            if "q_proj" in name:
                values = llama_cpp_order(values, config["num_attention_heads"])
            if "k_proj" in name:
                values = llama_cpp_order(values, config["num_key_value_heads"])
        tensors[gguf_name(name)] = (values, Type.F32)
    return tensors
