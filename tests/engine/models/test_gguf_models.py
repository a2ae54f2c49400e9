"""A GGUF file of each architecture gives the logits of transformers with the same weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind

from engine.models import load_model
from engine.weights import ModelStore
from tests.engine.conftest import reference_for
from tests.engine.paged import Sequential, assert_close, compute, nan_cache
from tests.engine.weights.ggml_blocks import DECODERS, decoded, quantized
from tests.engine.weights.tiny_models import (
    CONFIG,
    QWEN2,
    QWEN3,
    SMOLLM3,
    TinyGGUF,
    hf_tensors,
    write_hf_directory,
)

Tensors = dict[str, np.ndarray]

MISTRAL = CONFIG | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 16,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def weights(config: dict[str, Any]) -> Tensors:
    """Of a size that leaves activations as large as they are."""
    scaled = {}
    for name, values in hf_tensors(config, seed=3).items():
        is_norm = "norm" in name
        size = 0.1 if is_norm or values.ndim == 1 else 1.0 / math.sqrt(values.shape[-1])
        scaled[name] = values * np.float32(size) + np.float32(is_norm)
    return scaled


def assert_same_logits(folder: Path, tiny: TinyGGUF, config: dict[str, Any], hf: Tensors) -> None:
    files = ModelStore(folder / "cache").resolve(str(tiny.write(folder / "tiny.gguf")))
    model = load_model(files.directory)
    as_hf = config | {"pad_token_id": 0}
    reference = reference_for(write_hf_directory(folder / "hf", as_hf, hf))
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], 100).tolist()
    sequence, cache = Sequential(tokens, range(1, 30)), nan_cache(model)
    logits = [compute(model, cache, [(sequence, count)])[0] for count in (60, 1, 1, 38)]
    assert_close(torch.cat(logits), reference(tokens))


@pytest.mark.parametrize("config", [CONFIG, QWEN2, QWEN3, SMOLLM3], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_float32(tmp_path: Path, config: dict[str, Any], tied: bool) -> None:
    config = config | {"tie_word_embeddings": tied}
    hf = weights(config)
    assert_same_logits(tmp_path, TinyGGUF.of(config, hf), config, hf)


@pytest.mark.parametrize("config", [CONFIG, QWEN2, QWEN3, SMOLLM3], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_quantised(tmp_path: Path, config: dict[str, Any], kind: Type) -> None:
    """transformers computes with what decoders of our own make of the same blocks.

    Rows are permuted whole, so it does not matter whether that happens before quantising or after.
    """
    config = config | {"num_hidden_layers": 4 if config is SMOLLM3 else 1}
    hf, blocks = weights(config), {}
    for name, values in hf.items():
        if values.ndim == 2:
            blocks[name] = quantized(values, kind)
            hf[name] = decoded(blocks[name], kind).astype(np.float32)
    tiny = TinyGGUF.of(config, hf | blocks)
    for name, (values, _) in tiny.tensors.items():
        if values.dtype == np.uint8:
            tiny.tensors[name] = (values, kind)
    assert_same_logits(tmp_path, tiny, config, hf)


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    hf = weights(CONFIG)
    tiny = TinyGGUF.of(CONFIG, hf)
    tiny.metadata["llama.attention.sliding_window"] = (16, Kind.UINT32)
    assert_same_logits(tmp_path, tiny, MISTRAL, hf)


def test_llama3_s_scaling_is_a_divisor_of_each_frequency(tmp_path: Path) -> None:
    """The divisors as llama.cpp's converter makes them, one frequency at a time."""
    config = CONFIG | {"rope_scaling": LLAMA3_SCALING}
    divisors = []
    for pair in range(CONFIG["head_dim"] // 2):
        wave = 2 * math.pi * CONFIG["rope_theta"] ** (2 * pair / CONFIG["head_dim"])
        if wave < 32 / 4:
            divisors.append(1.0)
        elif wave > 32 / 1:
            divisors.append(8.0)
        else:
            smooth = (32 / wave - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    hf = weights(config)
    tiny = TinyGGUF.of(config, hf)
    tiny.tensors["rope_freqs.weight"] = (np.array(divisors, np.float32), Type.F32)
    assert_same_logits(tmp_path, tiny, config, hf)


def test_yarn(tmp_path: Path) -> None:
    config = QWEN2 | {"rope_scaling": YARN}
    hf = weights(config)
    tiny = TinyGGUF.of(config, hf)
    tiny.metadata |= {
        "qwen2.rope.scaling.type": ("yarn", Kind.STRING),
        "qwen2.rope.scaling.factor": (4.0, Kind.FLOAT32),
        "qwen2.rope.scaling.original_context_length": (32, Kind.UINT32),
    }
    assert_same_logits(tmp_path, tiny, config, hf)
