"""Weights of 4 bits: exactly the numbers that they stand for, and their products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import CompiledKernels, Kernels, PackedWeight, TorchKernels, dequantized
from tests.engine.kernels.guarded import assert_same_bits, guarded, threads

ROUNDING = 2e-6  # of the sum of magnitudes


def packed_weight(out_size: int, in_size: int, digits: torch.dtype = torch.float16) -> PackedWeight:
    """Of any steps, with scales that have as many digits as `digits`."""
    blocks, groups = -(-out_size // 16), in_size // 32
    values = torch.randint(0, 256, (blocks, groups, 16, 16), dtype=torch.uint8)
    scales = (0.1 * torch.randn(blocks, groups, 2, 16)).to(digits).float()
    return PackedWeight(values, guarded(scales), out_size)


def numbers_of(weight: PackedWeight) -> Tensor:
    """In float64, one by one."""
    out_size, in_size = weight.shape
    rows, columns = torch.arange(out_size)[:, None], torch.arange(in_size)
    at = rows // 16, columns // 32, columns % 16, rows % 16
    steps = weight.values[at].int() >> columns % 32 // 16 * 4 & 15
    scale, offset = (weight.scales[at[0], at[1], i, at[3]].double() for i in range(2))
    return steps * scale + offset


def check(result: Tensor, x: Tensor, weight: PackedWeight, *added: Tensor | None) -> None:
    numbers = numbers_of(weight).T
    expected, magnitude = x.double() @ numbers, x.double().abs() @ numbers.abs()
    for term in added:
        if term is not None:
            expected, magnitude = expected + term, magnitude + term.abs()
    assert result.is_contiguous()
    assert ((result - expected).abs() <= ROUNDING * magnitude).all()


@settings(max_examples=80, deadline=None)
@given(
    num_rows=st.one_of(st.integers(1, 40), st.integers(1, 300)),
    num_groups=st.integers(1, 50),
    out_size=st.integers(1, 150),
    has_more=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_linear(
    kernels: Kernels,
    num_rows: int,
    num_groups: int,
    out_size: int,
    has_more: bool,
    num_threads: int,
) -> None:
    torch.manual_seed(num_rows)
    weight = packed_weight(out_size, 32 * num_groups)
    x = guarded(torch.randn(num_rows, 32 * num_groups))
    bias = guarded(torch.randn(out_size)) if has_more else None
    residual = guarded(torch.randn(num_rows, out_size)) if has_more else None
    with threads(num_threads):
        check(kernels.linear(x, weight, bias, residual), x, weight, bias, residual)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_groups", [1, 18, 27])
@pytest.mark.parametrize("size", [1, 16, 40, 128])
@pytest.mark.parametrize("num_rows", [0, 3, 64, 65, 300])
def test_gated_linear(
    kernels: Kernels, num_rows: int, size: int, num_groups: int, has_bias: bool
) -> None:
    torch.manual_seed(size)
    weight = packed_weight(2 * size, 32 * num_groups)
    x = guarded(0.03 * torch.randn(num_rows, 32 * num_groups))
    bias = guarded(torch.randn(2 * size)) if has_bias else None
    result = kernels.gated_linear(x, weight, bias)
    gate_up = x.double() @ numbers_of(weight).T + (0 if bias is None else bias.double())
    gate, up = gate_up.chunk(2, dim=-1)
    assert result.is_contiguous()
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_each_number_is_rounded_once(kernels: Kernels) -> None:
    """Scales of Q4_K have 17 bits and their products with steps 21: then the offset is added."""
    torch.manual_seed(0)
    in_size = 64
    weight = packed_weight(40, in_size, torch.float32)
    exact = numbers_of(weight).float()
    assert_same_bits(dequantized(weight, torch.float32), exact)
    assert_same_bits(kernels.linear(torch.eye(in_size), weight).T.contiguous(), exact)
    assert weight.shape == (40, in_size)


def test_sizes_are_checked(both: CompiledKernels) -> None:
    weight = packed_weight(20, 64)
    for values, scales, num_rows in (
        (weight.values[:, :1], weight.scales, 20),
        (weight.values, weight.scales[:1], 20),
        (weight.values, weight.scales[:, :, :1].contiguous(), 20),
        (weight.values, weight.scales, 33),
        (weight.values, weight.scales, 16),
    ):
        x = torch.randn(2, values.shape[1] * 32)
        with pytest.raises(RuntimeError, match="a scale and an offset"):
            both.linear(x, PackedWeight(values, scales, num_rows))


def test_who_keeps_them(both: Kernels) -> None:
    assert (both.keeps_packed, TorchKernels().keeps_packed) == (True, False)
