"""The shared layers against one-line formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from engine.models.layers import RotaryEmbedding, linear, rms_norm, silu_and_mul


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_for_every_number_of_rows(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(num_rows, 24), torch.randn(10, 24), torch.randn(10)
    result = linear(x, weight, bias if has_bias else None)
    assert result.is_contiguous()
    torch.testing.assert_close(result, F.linear(x, weight, bias if has_bias else None))


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
