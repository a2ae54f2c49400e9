"""The hash model as a directory that can be served: its words are the numbers of its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.weights import ModelConfig, tensor_shapes
from engine.weights.safetensors_writer import write_safetensors
from tests.hash_model import EOS, HASH_MODEL, VOCABULARY


def hash_model_dir(path: Path, seed: int = 0) -> Path:
    """Write configuration, weights (which nobody reads) and tokenizer, and return `path`.

    Another seed makes another model of the same shape, which has another fingerprint.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_config_json()))
    _write_weights(path, seed)
    _write_tokenizer(path)
    return path


def _config_json() -> dict[str, object]:
    model = HASH_MODEL
    return {
        "architectures": [model.architecture],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": 2,  # rotary embeddings, which it has not, would need an even number
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.rms_norm_eps,
        "hidden_act": model.hidden_act,
        "tie_word_embeddings": model.tie_word_embeddings,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def _write_weights(path: Path, seed: int) -> None:
    shapes = tensor_shapes(ModelConfig.load(path / "config.json"))
    chance = np.random.default_rng(seed)
    weights = ((name, chance.random(shape, np.float32)) for name, shape in shapes.items())
    write_safetensors(path / "model.safetensors", shapes, weights, {"format": "pt"})


def _write_tokenizer(path: Path) -> None:
    vocabulary = {f"Ġ{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
