from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.weights import ModelFiles
from protocol import ModelError
from tests.engine.weights.tiny_models import CONFIG, hf_tensors, write_hf_directory, write_json


def fingerprint(directory: Path) -> str:
    return ModelFiles.read("m", directory).fingerprint


def test_reads_a_directory(tmp_path: Path) -> None:
    files = ModelFiles.read("org/m", write_hf_directory(tmp_path))
    assert (files.name, files.directory) == ("org/m", tmp_path)
    assert files.config.num_layers == 2
    assert (files.bos_token_id, files.eos_token_ids) == (1, (2,))


def test_fingerprint_is_the_same_wherever_the_weights_lie(tmp_path: Path) -> None:
    here = write_hf_directory(tmp_path / "here")
    there = shutil.copytree(here, tmp_path / "there")
    sharded = write_hf_directory(tmp_path / "sharded", num_shards=3)
    assert fingerprint(here) == fingerprint(there) == fingerprint(sharded)
    assert len(bytes.fromhex(fingerprint(here))) == 16


def test_fingerprint_ignores_how_answers_end(tmp_path: Path) -> None:
    here = write_hf_directory(tmp_path / "here")
    there = write_hf_directory(tmp_path / "there", CONFIG | {"eos_token_id": [0, 2]})
    assert fingerprint(here) == fingerprint(there)


def test_fingerprint_sees_weights_dtype_and_config(tmp_path: Path) -> None:
    tensors = hf_tensors()
    scaled = tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}
    half = {name: values.astype(np.float16) for name, values in tensors.items()}
    linear = {"type": "linear", "factor": 2.0}
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    window = {"sliding_window": 64}
    seen = {
        fingerprint(write_hf_directory(tmp_path / "plain")),
        fingerprint(write_hf_directory(tmp_path / "scaled", tensors=scaled)),
        fingerprint(write_hf_directory(tmp_path / "half", tensors=half)),
        fingerprint(write_hf_directory(tmp_path / "theta", CONFIG | {"rope_theta": 5e5})),
        fingerprint(write_hf_directory(tmp_path / "linear", CONFIG | {"rope_scaling": linear})),
        fingerprint(write_hf_directory(tmp_path / "mistral", CONFIG | mistral)),
        fingerprint(write_hf_directory(tmp_path / "window", CONFIG | mistral | window)),
    }
    assert len(seen) == 7


def test_generation_config_goes_before_config(tmp_path: Path) -> None:
    write_hf_directory(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [0, 1]})
    assert ModelFiles.read("m", tmp_path).eos_token_ids == (0, 1)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_the_tokenizer_s_eos_is_added(tmp_path: Path, eos: object) -> None:
    write_hf_directory(tmp_path, CONFIG | {"eos_token_id": 0})
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": eos})
    assert ModelFiles.read("m", tmp_path).eos_token_ids == (0, 2)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_file(tmp_path: Path, name: str) -> None:
    (write_hf_directory(tmp_path) / name).unlink()
    with pytest.raises(ModelError, match=f"{name} is missing") as caught:
        ModelFiles.read("m", tmp_path)
    assert caught.value.path == str(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize("content", [b"{", b"\xff", b"3"])
def test_broken_file(tmp_path: Path, name: str, content: bytes) -> None:
    (write_hf_directory(tmp_path) / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        ModelFiles.read("m", tmp_path)


def test_wrong_weights(tmp_path: Path) -> None:
    write_hf_directory(tmp_path, CONFIG | {"vocab_size": 300}, tensors=hf_tensors())
    with pytest.raises(ModelError, match=r"\[266, 256\], but config.json says \[300, 256\]"):
        ModelFiles.read("m", tmp_path)


def test_hint_at_a_gguf_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=r"name the file: .*/m.gguf"):
        ModelFiles.read("m", tmp_path)
