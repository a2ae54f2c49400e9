"""A tiny model of each family, and of each way in which models of a family differ.

Windows, and the contexts before rope scaling, are shorter than the texts of the tests.
"""

from __future__ import annotations

from typing import Any

Overrides = dict[str, Any]

OLD_CONTEXT = 32
WINDOW = 9


def _family(name: str, model_type: str, **overrides: Any) -> Overrides:
    return {"architectures": [name], "model_type": model_type, **overrides}


def _llama(**overrides: Any) -> Overrides:
    return _family("LlamaForCausalLM", "llama", num_hidden_layers=2, **overrides)


def _mistral(**overrides: Any) -> Overrides:
    return _family("MistralForCausalLM", "mistral", tie_word_embeddings=False, **overrides)


def _qwen2(**overrides: Any) -> Overrides:
    return _family("Qwen2ForCausalLM", "qwen2", rope_theta=1e6, rms_norm_eps=1e-6, **overrides)


def _qwen3(**overrides: Any) -> Overrides:
    return _family("Qwen3ForCausalLM", "qwen3", rope_theta=1e6, head_dim=32, **overrides)


def _smollm3(**overrides: Any) -> Overrides:
    own = {"rope_theta": 2e6, "num_hidden_layers": 5, "pad_token_id": 258}
    return _family("SmolLM3ForCausalLM", "smollm3", **own, **overrides)


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": OLD_CONTEXT,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": OLD_CONTEXT}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 8.0],
    "long_factor": [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 8.0],
    "original_max_position_embeddings": OLD_CONTEXT,
}

FAMILIES: dict[str, Overrides] = {
    "llama2": _llama(tie_word_embeddings=False, num_key_value_heads=4),
    "llama3": _llama(tie_word_embeddings=False, rope_theta=5e5),
    "llama3.1": _llama(rope_theta=2e3, rope_scaling=LLAMA3_SCALING),  # pairs of all three kinds
    "llama_linear": _llama(rope_scaling={"type": "linear", "factor": 4.0}),
    "llama_yarn": _llama(rope_scaling=YARN),
    "llama_yarn_mscale": _llama(
        rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
    ),
    "llama_yarn_own_factor": _llama(
        rope_scaling=YARN | {"attention_factor": 0.8, "beta_fast": 4.0, "beta_slow": 0.5}
    ),
    "llama_longrope": _llama(rope_scaling=LONGROPE, max_position_embeddings=256),
    "llama_biases": _llama(attention_bias=True, mlp_bias=True),
    "smollm2": _llama(
        hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8, rope_theta=1e5
    ),
    "smollm3": _smollm3(),
    "smollm3_own_layers": _smollm3(
        no_rope_layers=[0, 1, 1, 0, 1], attention_bias=True, mlp_bias=True
    ),
    "smollm3_window": _smollm3(
        use_sliding_window=True, sliding_window=WINDOW, no_rope_layer_interval=2
    ),
    "smollm3_yarn": _smollm3(rope_scaling=YARN),
    "mistral": _mistral(sliding_window=WINDOW),
    "mistral_nemo": _mistral(sliding_window=None, head_dim=24, rope_theta=1e6),
    "qwen2": _qwen2(),
    "qwen2.5_yarn": _qwen2(
        tie_word_embeddings=False, max_position_embeddings=OLD_CONTEXT, rope_scaling=YARN
    ),
    "qwen2_window": _qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen2_layer_types": _qwen2(
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3": _qwen3(),
    "qwen3_biases": _qwen3(tie_word_embeddings=False, attention_bias=True),
    "qwen3_window": _qwen3(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3_yarn": _qwen3(rope_scaling=YARN),
}
