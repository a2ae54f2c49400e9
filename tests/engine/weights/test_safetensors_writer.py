from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from engine.weights import open_weights
from engine.weights.safetensors_writer import float32_bytes, write_safetensors


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "b": rng.standard_normal((3, 5)).astype(np.float32),
        "a": rng.standard_normal(7).astype(np.float32),
        "c": rng.standard_normal((4, 6)).astype(np.float32).T,  # not contiguous
    }
    shapes = {name: values.shape for name, values in tensors.items()}
    path = tmp_path / "model.safetensors"
    write_safetensors(path, shapes, tensors.items(), {"source": "x.gguf"})

    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(loaded[name], values)
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"source": "x.gguf"}
    assert float32_bytes(shapes) == 4 * (15 + 7 + 24)


def test_bytes(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[np.uint8] | NDArray[np.float32]] = {
        "a": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "b": np.ones(2, np.float32),
    }
    shapes = {name: values.shape for name, values in tensors.items()}
    path = tmp_path / "model.safetensors"
    write_safetensors(path, shapes, tensors.items(), {}, of_bytes={"a"})
    loaded = load_file(path)
    for name, values in tensors.items():
        assert loaded[name].dtype == values.dtype
        np.testing.assert_array_equal(loaded[name], values)


def test_tensors_start_on_a_cache_line(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model.safetensors", {"a": (1,)}, [("a", np.ones(1, np.float32))], {}
    )
    assert open_weights(tmp_path).location("a").offset % 64 == 0


def test_order_and_shape_are_a_promise(tmp_path: Path) -> None:
    one = np.ones(1, np.float32)
    with pytest.raises(AssertionError):
        write_safetensors(tmp_path / "x", {"a": (1,), "b": (1,)}, [("b", one), ("a", one)], {})
    with pytest.raises(AssertionError):
        write_safetensors(tmp_path / "x", {"a": (2,)}, [("a", one)], {})
