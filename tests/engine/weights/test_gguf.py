from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from safetensors.numpy import load_file

from engine.kernels import PackedWeight, dequantized
from engine.weights import (
    FrequencyDivisors,
    LinearScaling,
    ModelConfig,
    ModelFiles,
    NoProgress,
    Stage,
    open_packed,
    scales_of,
)
from engine.weights.gguf import convert_gguf, unpermute
from protocol import ModelError
from tests.engine.weights.conftest import Steps
from tests.engine.weights.tiny_models import (
    CHAT_TEMPLATE,
    CONFIG,
    QWEN2,
    QWEN3,
    SMOLLM3,
    TinyGGUF,
    gguf_name,
    gguf_tensors,
    hf_tensors,
    llama_cpp_order,
)

QUANTISED = [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q6_K]


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


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
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


@pytest.mark.parametrize("config", [QWEN2, QWEN3, SMOLLM3], ids=lambda c: c["model_type"])
def test_other_families(tmp_path: Path, config: dict[str, Any]) -> None:
    target = convert(TinyGGUF.of(config), tmp_path)
    converted, expected = load_file(target / "model.safetensors"), hf_tensors(config)
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(converted[name], values, err_msg=name)
    as_hf = ModelConfig.parse(json.dumps(config).encode(), tmp_path)
    assert ModelConfig.load(target / "config.json") == as_hf


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("config", [QWEN2, QWEN3, SMOLLM3], ids=lambda c: c["model_type"])
def test_quantised_weights_of_other_families(
    tmp_path: Path, config: dict[str, Any], kind: Type
) -> None:
    tiny = TinyGGUF.of(config)
    tiny.quantize(kind)
    converted = load_file(convert(tiny, tmp_path) / "model.safetensors")
    for name, values in converted.items():
        raw, raw_type = tiny.tensors[gguf_name(name)]
        as_written, _ = gguf_tensors({name: values}, config)[gguf_name(name)]
        np.testing.assert_array_equal(as_written, gguf.quants.dequantize(raw, raw_type), name)


@pytest.mark.parametrize("config", [CONFIG, QWEN2, QWEN3, SMOLLM3], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q4_K], ids=lambda kind: kind.name)
def test_what_is_kept_in_4_bits_is_the_same_in_float32(
    tmp_path: Path, config: dict[str, Any], kind: Type
) -> None:
    tiny = TinyGGUF.of(config)
    tiny.quantize(kind)
    target = convert(tiny, tmp_path)
    converted, packed = load_file(target / "model.safetensors"), open_packed(target)
    assert packed is not None
    names = [name for name in packed.names if not name.endswith(".scales")]
    assert {f"{name}.scales" for name in names} | set(names) == set(packed.names)
    as_4_bits = [name for name, (_, its) in tiny.tensors.items() if its == kind]
    assert sorted(map(gguf_name, names)) == sorted(as_4_bits)
    content = load_file(target / "packed.safetensors")
    for name in names:
        weight = PackedWeight(
            torch.from_numpy(content[name]),
            torch.from_numpy(content[scales_of(name)]),
            len(converted[name]),
        )
        numbers = dequantized(weight, torch.float32).numpy()
        np.testing.assert_array_equal(numbers, converted[name], err_msg=name)


def test_what_is_read_together_lies_together(tmp_path: Path) -> None:
    tiny = TinyGGUF()
    tiny.quantize(Type.Q4_1)
    packed = open_packed(convert(tiny, tmp_path))
    assert packed is not None
    [names] = packed.files().values()
    layer = [n for n in names if n.startswith("model.layers.0.") and not n.endswith(".scales")]
    parts = [name.split(".")[-2] for name in layer]
    assert [p for p in parts if p in {"q_proj", "k_proj", "v_proj"}] == [
        "q_proj",
        "k_proj",
        "v_proj",
    ]
    assert parts[parts.index("gate_proj") + 1] == "up_proj"
    assert parts[parts.index("q_proj") + 1 : parts.index("q_proj") + 3] == ["k_proj", "v_proj"]


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q6_K], ids=lambda kind: kind.name)
def test_other_types_are_kept_in_float32_only(tmp_path: Path, kind: Type) -> None:
    tiny = TinyGGUF()
    tiny.quantize(kind)
    target = convert(tiny, tmp_path)
    assert open_packed(target) is None
    assert not (target / "packed.safetensors").exists()


def test_a_window_makes_a_llama_a_mistral(tmp_path: Path) -> None:
    tiny = TinyGGUF()
    tiny.metadata["llama.attention.sliding_window"] = (16, Kind.UINT32)
    config = ModelConfig.load(convert(tiny, tmp_path) / "config.json")
    assert config.architecture == "MistralForCausalLM"
    assert [config.window(layer) for layer in range(2)] == [16, 16]


@pytest.mark.parametrize("window", [0, 128, 16])
def test_a_window_of_other_families(tmp_path: Path, window: int) -> None:
    """One that reaches as far as the model changes nothing; of another the layers are not known."""
    tiny = TinyGGUF.of(QWEN2)
    tiny.metadata["qwen2.attention.sliding_window"] = (window, Kind.UINT32)
    if window == 16:
        assert "qwen2.attention.sliding_window is 16, but which layers" in refusal(tiny, tmp_path)
    else:
        config = ModelConfig.load(convert(tiny, tmp_path) / "config.json")
        assert [config.window(layer) for layer in range(2)] == [None, None]


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"type": "yarn", "factor": 4.0}, {"type": "yarn", "factor": 4.0}),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 64,
                "attn_factor": 0.5,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
                "yarn_ext_factor": 1.0,
            },
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1.0),
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling(
    tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    tiny = TinyGGUF()
    kinds = {str: Kind.STRING, int: Kind.UINT32, float: Kind.FLOAT32}
    for key, value in metadata.items():
        tiny.metadata[f"llama.rope.scaling.{key}"] = (value, kinds[type(value)])
    as_hf = ModelConfig.parse(json.dumps(CONFIG | {"rope_scaling": scaling}).encode(), tmp_path)
    assert ModelConfig.load(convert(tiny, tmp_path) / "config.json") == as_hf


def test_rope_scaling_of_very_old_files(tmp_path: Path) -> None:
    tiny = TinyGGUF()
    tiny.metadata["llama.rope.scale_linear"] = (8.0, Kind.FLOAT32)
    config = ModelConfig.load(convert(tiny, tmp_path) / "config.json")
    assert config.rope_scaling == LinearScaling(factor=8.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("yarn_ext_factor", 0.5), ("yarn_attn_factor", 1.2), ("yarn_log_multiplier", 0.1)],
)
def test_yarn_of_another_kind_is_refused(tmp_path: Path, key: str, value: float) -> None:
    tiny = TinyGGUF()
    tiny.metadata["llama.rope.scaling.type"] = ("yarn", Kind.STRING)
    tiny.metadata["llama.rope.scaling.factor"] = (4.0, Kind.FLOAT32)
    tiny.metadata[f"llama.rope.scaling.{key}"] = (value, Kind.FLOAT32)
    assert f"llama.rope.scaling.{key} is {value:.2}" in refusal(tiny, tmp_path)


def test_divisors_of_frequencies(tmp_path: Path) -> None:
    """What llama.cpp makes of Llama 3's scaling."""
    tiny = TinyGGUF()
    divisors = np.linspace(1.0, 8.0, 32, dtype=np.float32)
    tiny.tensors["rope_freqs.weight"] = (divisors, Type.F32)
    target = convert(tiny, tmp_path)
    config = ModelConfig.load(target / "config.json")
    expected = FrequencyDivisors(divisors=tuple(map(float, divisors)), attention_factor=1.0)
    assert config.rope_scaling == expected
    assert "rope_freqs.weight" not in load_file(target / "model.safetensors")

    tiny.metadata["llama.rope.scaling.factor"] = (4.0, Kind.FLOAT32)
    folder = tmp_path / "twice"
    folder.mkdir()
    assert "rope_freqs.weight beside rope scaling of type 'linear'" in refusal(tiny, folder)


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
        (
            "llama.rope.scaling.type",
            ("yarn", Kind.STRING),
            "scaling.factor is missing, which 'yarn'",
        ),
        ("llama.rope.scaling.type", ("linear", Kind.STRING), "which 'linear' needs"),
        ("llama.rope.scaling.type", ("longrope", Kind.STRING), "known: none, linear, yarn"),
        ("llama.attention.value_length", (32, Kind.UINT32), "values of 32 dimensions"),
        ("llama.attention.clamp_kqv", (8.0, Kind.FLOAT32), "attention.clamp_kqv is 8.0"),
        ("llama.logit_scale", (2.0, Kind.FLOAT32), "llama.logit_scale is 2.0"),
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
    assert "unknown architecture 'mamba'; known: llama, qwen2, qwen3, smollm3" in said


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    one = (np.ones(4, np.float32), Type.F32)
    for name, said in {
        "rope_freqs.weight": "rope_freqs.weight has shape [4], but its metadata says [32]",
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
