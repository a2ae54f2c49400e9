"""Which tensors a model has: their names in Hugging Face and in GGUF, and their shapes.

All families name them alike; they differ in which biases and norms they have.
"""

from __future__ import annotations

import re

from engine.weights.config import ModelConfig

Shape = tuple[int, ...]

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<leaf>weight|bias)")

# Tensors that checkpoints may carry and that no computation needs: the tables of old rotary
# embeddings, and an output projection that the config declares to be the embedding.
_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the model needs, by its Hugging Face name.

    Shapes are `[out, in]`, as `torch.nn.Linear` stores them. A tied output projection is left out.
    """
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may carry this tensor although nothing reads it."""
    tied_output = name == "lm_head.weight" and config.tie_word_embeddings
    return tied_output or _ROTARY_TABLE.fullmatch(name) is not None


def from_gguf_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; None if it has none."""
    match = _GGUF_NAME.fullmatch(name)
    if match is None or match["part"] not in _GGUF_NAMES:
        return None
    prefix = "" if match["layer"] is None else f"model.layers.{int(match['layer'])}."
    return f"{prefix}{_GGUF_NAMES[match['part']]}.{match['leaf']}"


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    attention = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
    }
    mlp = {
        "mlp.gate_proj": (config.intermediate_size, hidden),
        "mlp.up_proj": (config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
    }
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes |= {f"{name}.weight": shape for name, shape in (attention | mlp).items()}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    with_bias = {
        name: shape for name, shape in attention.items() if _has_attention_bias(name, config)
    }
    if config.mlp_bias:
        with_bias |= mlp
    return shapes | {f"{name}.bias": shape[:1] for name, shape in with_bias.items()}


def _has_attention_bias(name: str, config: ModelConfig) -> bool:
    is_output = name == "self_attn.o_proj"
    return config.attention_output_bias if is_output else config.attention_bias
