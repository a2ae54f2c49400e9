"""Layers of a checkpoint's tensors, against one-line formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from engine.engine_config import Quantization
from engine.kernels import Int8Weight, TorchKernels, dequantized
from engine.models.layers import Layers, RotaryEmbedding
from engine.models.mapped_weights import MappedWeights
from engine.models.quantization import quantized
from engine.weights import ModelConfig, open_weights
from tests.engine.tiny import tiny_model_dir

ATTENTION = "model.layers.1.self_attn"
QKV = tuple(f"{ATTENTION}.{name}_proj" for name in "qkv")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), seed=3, attention_bias=True)


@pytest.fixture(scope="module")
def tensors(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def layers_of(directory: Path, quantization: Quantization | None = None) -> Layers:
    index = open_weights(directory)
    index.check(ModelConfig.load(directory / "config.json"), directory)
    return Layers(MappedWeights(index), TorchKernels(), quantization)


@pytest.fixture(scope="module")
def layers(directory: Path) -> Layers:
    return layers_of(directory)


def rows(count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_embedding(layers: Layers, tensors: dict[str, Tensor]) -> None:
    ids = torch.tensor([5, 0, 319, 5])
    result = layers.embedding("model.embed_tokens")(ids)
    assert torch.equal(result, tensors["model.embed_tokens.weight"][ids])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_linear(
    layers: Layers, tensors: dict[str, Tensor], has_bias: bool, has_residual: bool
) -> None:
    x, residual = rows(5, 64), rows(5, 64) if has_residual else None
    name = f"{ATTENTION}.o_proj"
    bias = tensors[f"{name}.bias"] if has_bias else None
    expected = F.linear(x, tensors[f"{name}.weight"], bias)
    linear = layers.linear(name, bias=has_bias)
    close(linear(x, residual), expected if residual is None else expected + residual)


@pytest.mark.parametrize("has_bias", [False, True])
def test_several_projections_as_one(
    layers: Layers, tensors: dict[str, Tensor], has_bias: bool
) -> None:
    x = rows(5, 64)
    each = [
        F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"] if has_bias else None)
        for name in QKV
    ]
    close(layers.linear(*QKV, bias=has_bias)(x), torch.cat(each, dim=-1))


def test_in_eight_bits(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Projections are rounded; embeddings, norms and biases stay as they are."""
    layers = layers_of(directory, Quantization.INT8)
    linear = layers.linear(*QKV, bias=True)
    full = torch.cat([tensors[f"{name}.weight"] for name in QKV])
    expected = quantized(full, Quantization.INT8)
    assert isinstance(linear.weight, Int8Weight)
    assert torch.equal(linear.weight.values, expected.values)
    assert torch.equal(linear.weight.scales, expected.scales)
    bias = torch.cat([tensors[f"{name}.bias"] for name in QKV])
    x = rows(5, 64)
    close(linear(x), F.linear(x, dequantized(expected, torch.float32), bias))
    embedding = layers.embedding("model.embed_tokens")
    assert torch.equal(embedding.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(layers.rms_norm("model.norm", 1e-5).weight, tensors["model.norm.weight"])


def test_rms_norm(layers: Layers, tensors: dict[str, Tensor]) -> None:
    x = rows(3, 64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * tensors["model.norm.weight"]
    close(layers.rms_norm("model.norm", 1e-5)(x), expected)


def test_gated_linear(layers: Layers, tensors: dict[str, Tensor]) -> None:
    mlp = "model.layers.0.mlp"
    gate, up = (tensors[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up"))
    x = rows(5, 64)
    gates = F.linear(x, gate)
    gated = layers.gated_linear(f"{mlp}.gate_proj", f"{mlp}.up_proj")
    close(gated(x), gates / (1 + (-gates).exp()) * F.linear(x, up))


class TestRotary:
    FREQUENCIES = 100.0 ** -(torch.arange(4, dtype=torch.float32) / 4)
    POSITIONS = torch.tensor([0, 5, 1000, 5])

    @pytest.mark.parametrize("factor", [1.0, 0.7])
    def test_pairs_turn_by_the_position_times_their_frequency(
        self, layers: Layers, factor: float
    ) -> None:
        heads = rows(8, 8).view(4, 2, 8)
        pairs = torch.complex(heads[..., :4], heads[..., 4:]).to(torch.complex128)
        angles = self.POSITIONS[:, None, None] * self.FREQUENCIES.double()
        turned = pairs * factor * torch.exp(1j * angles)
        expected = torch.cat((turned.real, turned.imag), -1).float()
        rotation = layers.rotary(self.FREQUENCIES, factor).at(self.POSITIONS)
        result = rotation(heads)
        assert result is heads
        torch.testing.assert_close(result, expected, atol=2e-4, rtol=0)

    def test_a_token_turns_the_same_in_any_batch(self, layers: Layers) -> None:
        rotary = layers.rotary(10_000.0 ** -(torch.arange(36) / 36))
        positions = torch.randint(0, 8192, (3000,), generator=torch.Generator().manual_seed(0))
        whole = rotary.at(positions)
        for start, end in ((0, 1), (1, 3), (17, 118), (2500, 3000), (2999, 3000)):
            part = rotary.at(positions[start:end])
            assert torch.equal(part.cos, whole.cos[start:end])
            assert torch.equal(part.sin, whole.sin[start:end])

    def test_in_the_numbers_of_the_model(self) -> None:
        """Angles are computed in float32 whatever the model is in."""
        rotary = RotaryEmbedding(TorchKernels(), self.FREQUENCIES, torch.bfloat16)
        angles = self.POSITIONS[:, None] * self.FREQUENCIES
        rotation = rotary.at(self.POSITIONS)
        assert torch.equal(rotation.cos, angles.cos().to(torch.bfloat16))
        assert torch.equal(rotation.sin, angles.sin().to(torch.bfloat16))


def test_of_a_checkpoint_in_half_precision(directory: Path, tmp_path: Path) -> None:
    """Layers are in float32, by the numbers that are stored."""
    stored = load_file(directory / "model.safetensors")
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    save_file(halved, tmp_path / "model.safetensors", {"format": "pt"})
    weight = layers_of(tmp_path).linear(*QKV).weight
    assert isinstance(weight, Tensor)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, torch.cat([halved[f"{name}.weight"] for name in QKV]).float())
