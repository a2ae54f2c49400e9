"""Weights are views of their files where that is possible, and right where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.models import load_model
from engine.models.mapped_weights import MappedWeights
from engine.weights import open_weights
from engine.weights.safetensors_writer import write_safetensors
from protocol import ModelError
from tests.engine.tiny import tiny_model_dir

SHAPES = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "o": (6, 4), "norm": (6,)}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_adjacent_tensors_are_stacked_without_a_copy(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, SHAPES, ((name, t.numpy()) for name, t in tensors.items()), {})
    weights = MappedWeights(open_weights(tmp_path))
    stacked = weights.stacked("q", "k", "v")
    assert stacked.equal(torch.cat([tensors["q"], tensors["k"], tensors["v"]]))
    assert stacked.data_ptr() == weights.tensor("q").data_ptr()
    # In another order they are not adjacent.
    assert weights.stacked("v", "q").equal(torch.cat([tensors["v"], tensors["q"]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_writers_and_dtypes(
    tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    weights = MappedWeights(open_weights(tmp_path))
    for name, tensor in stored.items():
        assert weights.tensor(name).dtype == torch.float32
        assert weights.tensor(name).equal(tensor.float())
    expected = torch.cat([stored["q"], stored["k"], stored["v"]]).float()
    assert weights.stacked("q", "k", "v").equal(expected)


def test_tensors_at_odd_addresses(tmp_path: Path) -> None:
    """Allowed by the format: a tensor of bytes in front moves the next one off its alignment."""
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    )
    values = torch.tensor([1.5, -2.0])
    content = len(header).to_bytes(8, "little") + header + b"xyz" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    assert MappedWeights(open_weights(tmp_path)).tensor("b").equal(values)


def test_writing_to_a_weight_does_not_reach_the_file(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    MappedWeights(open_weights(tmp_path)).tensor("q").zero_()
    assert MappedWeights(open_weights(tmp_path)).tensor("q").equal(tensors["q"])


def test_a_directory_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match="is missing"):
        load_model(directory)
