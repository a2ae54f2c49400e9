from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.weights import ModelConfig, open_weights, tensor_shapes
from protocol import ModelError
from tests.engine.weights.tiny_models import CONFIG, hf_tensors, write_hf_directory, write_json


def check(directory: Path) -> None:
    open_weights(directory).check(ModelConfig.load(directory / "config.json"), directory)


def rewrite_header(path: Path, change: dict[str, Any]) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for name, fields in change.items():
        header[name] |= fields
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])


@pytest.mark.parametrize("num_shards", [1, 3])
def test_finds_every_tensor(tmp_path: Path, num_shards: int) -> None:
    tensors = hf_tensors()
    directory = write_hf_directory(tmp_path, tensors=tensors, num_shards=num_shards)
    index = open_weights(directory)
    check(directory)
    assert index.names == tuple(sorted(tensors))
    assert len(index.files()) == num_shards
    assert sorted(name for names in index.files().values() for name in names) == sorted(tensors)
    for name, values in tensors.items():
        where = index.location(name)
        assert (index.shape(name), index.dtype(name)) == (values.shape, "F32")
        raw = where.path.read_bytes()[where.offset : where.offset + where.nbytes]
        assert raw == values.tobytes()


def test_names_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    index = open_weights(write_hf_directory(tmp_path))
    for names in index.files().values():
        offsets = [index.location(name).offset for name in names]
        assert offsets == sorted(offsets)


def test_half_precision(tmp_path: Path) -> None:
    tensors = {name: values.astype(np.float16) for name, values in hf_tensors().items()}
    index = open_weights(write_hf_directory(tmp_path, tensors=tensors))
    assert {index.dtype(name) for name in index.names} == {"F16"}


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_numbers_that_no_one_said_how_to_scale(tmp_path: Path, dtype: type) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = hf_tensors()
    directory = write_hf_directory(tmp_path, tensors=tensors | {name: tensors[name].astype(dtype)})
    with pytest.raises(ModelError, match=rf"tensor {name} has dtype .*; known: BF16, F16, F32"):
        check(directory)


def test_needed_tensors_are_those_of_the_model() -> None:
    config = ModelConfig.parse(json.dumps(CONFIG).encode(), Path("config.json"))
    assert tensor_shapes(config) == {name: v.shape for name, v in hf_tensors().items()}


def test_biases_are_needed_if_the_config_says_so() -> None:
    raw = CONFIG | {"attention_bias": True, "mlp_bias": True}
    shapes = tensor_shapes(ModelConfig.parse(json.dumps(raw).encode(), Path("config.json")))
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (128,)
    assert shapes["model.layers.0.self_attn.o_proj.bias"] == (256,)
    assert shapes["model.layers.0.mlp.up_proj.bias"] == (512,)


def test_untied_output_is_needed(tmp_path: Path) -> None:
    untied = CONFIG | {"tie_word_embeddings": False}
    check(write_hf_directory(tmp_path / "whole", untied))
    lacking = write_hf_directory(tmp_path / "lacking", untied, tensors=hf_tensors(CONFIG))
    with pytest.raises(ModelError, match=r"lm_head.weight \[266, 256\] is missing"):
        check(lacking)


def test_redundant_tensors_are_let_pass(tmp_path: Path) -> None:
    tensors = hf_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(32, np.float32)
    check(write_hf_directory(tmp_path, tensors=tensors))


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = hf_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight \[512, 256\] is miss"):
        check(write_hf_directory(tmp_path, tensors=tensors))


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = hf_tensors() | {"model.norm.weight": np.ones(255, np.float32)}
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \[255\].*says \[256\]"):
        check(write_hf_directory(tmp_path, tensors=tensors))


def test_superfluous_tensor(tmp_path: Path) -> None:
    tensors = hf_tensors() | {"model.layers.2.mlp.up_proj.weight": np.ones((512, 256), np.float32)}
    with pytest.raises(ModelError, match=r"model.layers.2.mlp.up_proj.weight .* has no place"):
        check(write_hf_directory(tmp_path, tensors=tensors))


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only safetensors"):
        open_weights(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 9, 500, -1])
def test_cut_off_anywhere(tmp_path: Path, keep: int) -> None:
    path = write_hf_directory(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_weights(tmp_path)


def test_too_long(tmp_path: Path) -> None:
    path = write_hf_directory(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ModelError, match="its header promises"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shape": [255]}, "do not fit"),
        ({"data_offsets": [1, 1025]}, "do not fit"),
        ({"dtype": "X7"}, "unknown dtype 'X7'"),
        ({"shape": [-256]}, "impossible shape"),
        ({"shape": "256"}, "does not parse"),
    ],
)
def test_corrupt_header(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = write_hf_directory(tmp_path) / "model.safetensors"
    rewrite_header(path, {"model.norm.weight": fields})
    with pytest.raises(ModelError, match=said):
        open_weights(tmp_path)


@pytest.mark.parametrize("junk", [b"not json", b"[1, 2]", b"\xff\xff", b'{"a": 1}'])
def test_header_that_is_none(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(junk).to_bytes(8, "little") + junk)
    with pytest.raises(ModelError, match="does not parse"):
        open_weights(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path, num_shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors: cannot be read"):
        open_weights(directory)


def test_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path, num_shards=2)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    write_json(path, index)
    with pytest.raises(ModelError, match=r"holds model\.norm\.weight, but it does not"):
        open_weights(directory)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": "../b"}}])
def test_broken_index(tmp_path: Path, index: dict[str, Any]) -> None:
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(ModelError, match=r"index\.json"):
        open_weights(tmp_path)


def test_single_file_goes_before_an_index(tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path, num_shards=2)
    save_file(hf_tensors(), directory / "model.safetensors")
    assert [path.name for path in open_weights(directory).files()] == ["model.safetensors"]
    assert load_file(directory / "model.safetensors").keys() == set(open_weights(directory).names)
