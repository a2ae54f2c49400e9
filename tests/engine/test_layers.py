"""The shared layers against one-line formulas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from engine.models.layers import RotaryEmbedding, linear, rms_norm, silu_and_mul


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 9, 33, 128, 129])
@pytest.mark.parametrize(("out_size", "in_size"), [(64, 24), (24, 64), (10, 24), (10, 6)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_for_every_shape(num_rows: int, out_size: int, in_size: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, in_size), torch.randn(out_size, in_size)
    bias = torch.randn(out_size) if has_bias else None
    result = linear(x, weight, bias)
    assert result.is_contiguous()
    torch.testing.assert_close(result, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 16), torch.randn(16)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_silu_and_mul() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), -1)), expected)


def test_rotary_turns_pairs_by_the_position_times_their_frequency() -> None:
    torch.manual_seed(0)
    heads, positions = torch.randn(3, 2, 8), torch.tensor([0, 5, 1000])
    rotated = RotaryEmbedding(8, theta=100.0).at(positions)(heads)
    pairs = torch.complex(heads[..., :4], heads[..., 4:]).to(torch.complex128)
    frequencies = 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    turned = pairs * torch.exp(1j * positions[:, None, None] * frequencies)
    expected = torch.cat((turned.real, turned.imag), -1).float()
    torch.testing.assert_close(rotated, expected, atol=2e-4, rtol=0)
