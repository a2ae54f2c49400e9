from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from safetensors.numpy import load_file

from engine.weights import ModelConfig, ModelFiles, NoProgress, Stage
from engine.weights.gguf import convert_gguf, unpermute
from protocol import ModelError
from tests.engine.weights.conftest import Steps
from tests.engine.weights.tiny_models import (
    CHAT_TEMPLATE,
    TinyGGUF,
    gguf_name,
    hf_tensors,
    llama_cpp_order,
)


def convert(tiny: TinyGGUF, folder: Path) -> Path:
    target = folder / "converted"
    target.mkdir()
    convert_gguf(tiny.write(folder / "tiny.gguf"), target, NoProgress())
    return target


def refusal(tiny: TinyGGUF, folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        convert(tiny, folder)
    assert str(folder / "tiny.gguf") in str(caught.value)
    return str(caught.value)


def test_gives_back_the_weights_that_llama_cpp_was_given(tmp_path: Path) -> None:
    converted = load_file(convert(TinyGGUF(), tmp_path) / "model.safetensors")
    expected = hf_tensors()
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(converted[name], values, err_msg=name)


@pytest.mark.parametrize(
    "kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q6_K]
)
def test_quantised_weights(tmp_path: Path, kind: Type) -> None:
    tiny = TinyGGUF()
    tiny.quantize(kind)
    converted = load_file(convert(tiny, tmp_path) / "model.safetensors")
    for name, values in converted.items():
        raw, raw_type = tiny.tensors[gguf_name(name)]
        expected = gguf.quants.dequantize(raw, raw_type)
        if "q_proj" in name or "k_proj" in name:
            values = llama_cpp_order(values, 4 if "q_proj" in name else 2)
        np.testing.assert_array_equal(values, expected, err_msg=name)


def test_unpermute_undoes_llama_cpp_s_order() -> None:
    rows = np.random.default_rng(0).standard_normal((6 * 10, 8)).astype(np.float32)
    np.testing.assert_array_equal(unpermute(llama_cpp_order(rows, 6), 6), rows)
    bias = rows[:, 0].copy()
    np.testing.assert_array_equal(unpermute(llama_cpp_order(bias, 6), 6), bias)


def test_attention_scores_are_those_of_ggml_s_rope() -> None:
    """ggml turns rows 2i and 2i + 1 of its order, Hugging Face rows i and i + d/2 of ours."""
    rng = np.random.default_rng(0)
    head_dim, hidden = 8, 16
    q_rows, k_rows = rng.standard_normal((2, head_dim, hidden)).astype(np.float32)
    x, y = rng.standard_normal((2, hidden)).astype(np.float32)
    angles = 10000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))

    def ggml_rope(v: np.ndarray, position: int) -> np.ndarray:
        turned = (v[0::2] + 1j * v[1::2]) * np.exp(1j * position * angles)
        return np.stack([turned.real, turned.imag], axis=1).ravel()

    def hugging_face_rope(v: np.ndarray, position: int) -> np.ndarray:
        cos, sin = (np.tile(f(position * angles), 2) for f in (np.cos, np.sin))
        return v * cos + np.concatenate([-v[head_dim // 2 :], v[: head_dim // 2]]) * sin

    theirs = ggml_rope(q_rows @ x, 5) @ ggml_rope(k_rows @ y, 3)
    ours = hugging_face_rope(unpermute(q_rows, 1) @ x, 5) @ hugging_face_rope(
        unpermute(k_rows, 1) @ y, 3
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_config(tmp_path: Path) -> None:
    target = convert(TinyGGUF(), tmp_path)
    config = ModelConfig.load(target / "config.json")
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (4, 2, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (266, 128)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-5)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_writes_a_complete_directory(tmp_path: Path) -> None:
    target = convert(TinyGGUF(), tmp_path)
    files = ModelFiles.read("tiny", target)
    assert (files.bos_token_id, files.eos_token_ids) == (1, (2,))
    assert (target / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer_config = json.loads((target / "tokenizer_config.json").read_text())
    assert tokenizer_config["bos_token"] == "<|im_start|>"
    assert tokenizer_config["unk_token"] == "<|endoftext|>"


def test_untied_output(tmp_path: Path) -> None:
    tiny = TinyGGUF()
    output = np.random.default_rng(1).standard_normal((266, 256)).astype(np.float32)
    tiny.tensors["output.weight"] = (output, Type.F32)
    target = convert(tiny, tmp_path)
    assert not ModelConfig.load(target / "config.json").tie_word_embeddings
    converted = load_file(target / "model.safetensors")
    np.testing.assert_array_equal(converted["lm_head.weight"], output)


def test_biases(tmp_path: Path) -> None:
    tiny = TinyGGUF()
    sizes = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256}
    for layer in range(2):
        for part, size in sizes.items():
            bias = np.arange(size, dtype=np.float32)
            tiny.tensors[f"blk.{layer}.{part}.bias"] = (bias, Type.F32)
    converted = load_file(convert(tiny, tmp_path) / "model.safetensors")
    k_bias = converted["model.layers.1.self_attn.k_proj.bias"]
    np.testing.assert_array_equal(llama_cpp_order(k_bias, 2), np.arange(128))


def test_several_tokens_end_an_answer(tmp_path: Path) -> None:
    tiny = TinyGGUF()
    tiny.metadata["tokenizer.ggml.eot_token_id"] = (0, Kind.UINT32)
    tiny.metadata["tokenizer.ggml.eom_token_id"] = (2, Kind.UINT32)
    assert ModelFiles.read("tiny", convert(tiny, tmp_path)).eos_token_ids == (2, 0)


def test_progress_counts_tensors(tmp_path: Path, steps: Steps) -> None:
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(TinyGGUF().write(tmp_path / "tiny.gguf"), target, steps)
    assert steps.of(Stage.CONVERT) == [(done, 20) for done in range(21)]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.expert_count", (8, Kind.UINT32), "mixture of experts"),
        ("split.count", (3, Kind.UINT16), "one part of several"),
        ("llama.rope.scaling.type", ("yarn", Kind.STRING), "'yarn'"),
        ("llama.rope.dimension_count", (32, Kind.UINT32), "rotates 32 of 64"),
        ("llama.block_count", (3, Kind.UINT32), "model.layers.2"),
        ("llama.block_count", (1, Kind.UINT32), "blk.1"),
        ("llama.attention.head_count_kv", (4, Kind.UINT32), "attn_k.weight has shape [128, 256]"),
        ("llama.attention.head_count_kv", ([2, 2], Kind.ARRAY), "is list, not int"),
        ("llama.attention.head_count", (0, Kind.UINT32), "head_count is 0"),
        ("llama.embedding_length", ("x", Kind.STRING), "is str, not int"),
        ("tokenizer.ggml.tokens", (["a", "b", "c"], Kind.ARRAY), "says [3, 256]"),
    ],
)
def test_metadata_that_is_refused(
    tmp_path: Path, key: str, value: tuple[Any, Kind], said: str
) -> None:
    tiny = TinyGGUF()
    tiny.metadata[key] = value
    assert said in refusal(tiny, tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ],
)
def test_metadata_that_is_missing(tmp_path: Path, key: str) -> None:
    tiny = TinyGGUF()
    del tiny.metadata[key]
    assert f"metadata {key} is missing" in refusal(tiny, tmp_path)


def test_unknown_architecture(tmp_path: Path) -> None:
    said = refusal(TinyGGUF(architecture="mamba"), tmp_path)
    assert "unknown architecture 'mamba'; known: llama" in said


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    one = (np.ones(4, np.float32), Type.F32)
    for name, said in {
        "rope_freqs.weight": "'llama3'",
        "blk.0.attn_q_norm.weight": "blk.0.attn_q_norm.weight [4] has no place",
        "blk.7.ffn_up.weight": "blk.7.ffn_up.weight [4] has no place",
        "strange": "strange [4] has no place",
        "output_norm.weight": "output_norm.weight has shape [4], but its metadata says [256]",
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        tiny = TinyGGUF()
        tiny.tensors[name] = one
        assert said in refusal(tiny, folder)


def test_tensor_that_is_missing(tmp_path: Path) -> None:
    tiny = TinyGGUF()
    del tiny.tensors["blk.1.ffn_down.weight"]
    assert "model.layers.1.mlp.down_proj.weight [256, 512] is missing" in refusal(tiny, tmp_path)


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoom:
        free = 1_000_000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: NoRoom)
    with pytest.raises(ModelError, match=r"only 0\.0 GB are free"):
        convert(TinyGGUF(), tmp_path)
