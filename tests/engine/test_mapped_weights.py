"""Weights are views of their files where that is possible, and right where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from engine.engine_config import Quantization
from engine.kernels import CompiledKernels, TorchKernels, dequantized
from engine.models import load_model, loader
from engine.models.mapped_weights import MappedWeights
from engine.weights import NoProgress, open_packed, open_weights
from engine.weights.gguf import convert_gguf
from engine.weights.safetensors_writer import write_safetensors
from protocol import ModelError
from tests.engine.paged import Sequential, compute, nan_cache
from tests.engine.tiny import tiny_model_dir
from tests.engine.weights.tiny_models import TinyGGUF

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


class TestPacked:
    """What a converted model has in 4 bits as well."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        tiny = TinyGGUF()
        tiny.quantize(Type.Q4_1)
        target = tmp_path / "converted"
        target.mkdir()
        convert_gguf(tiny.write(tmp_path / "tiny.gguf"), target, NoProgress())
        return target

    def test_is_mapped(self, directory: Path) -> None:
        index = open_weights(directory)
        weights = MappedWeights(index, packed=open_packed(directory))
        names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
        packed = weights.packed(*names)
        assert packed is not None
        assert torch.equal(dequantized(packed, torch.float32), weights.stacked(*names))
        first = weights.packed(names[0])
        assert first is not None
        assert packed.values.data_ptr() == first.values.data_ptr()
        assert packed.scales.data_ptr() == first.scales.data_ptr()
        assert weights.packed(names[0], "model.norm.weight") is None
        assert MappedWeights(index).packed(*names) is None

    def test_models_compute_the_same(self, directory: Path) -> None:
        for num_tokens in (1, 9, 100):
            ids = [token % 50 for token in range(num_tokens)]
            results = []
            for kernels in (CompiledKernels(), Unpacking()):
                model = load_model(directory, kernels)
                sequence = Sequential(ids, range(1, 30))
                [logits] = compute(model, nan_cache(model), [(sequence, num_tokens)])
                results.append(logits)
            torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)

    def test_only_in_float32(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(directory: Path) -> None:
            raise AssertionError(directory)

        monkeypatch.setattr(loader, "open_packed", refuse)
        load_model(directory, TorchKernels())
        load_model(directory, CompiledKernels(), quantization=Quantization.INT8)
        load_model(directory, TorchKernels(), dtype=torch.bfloat16)
        with pytest.raises(AssertionError):
            load_model(directory, CompiledKernels())


class Unpacking(CompiledKernels):
    keeps_packed = False
