"""Weights of 4 bits give the same bits as the float32 weights that they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import CompiledKernels, Kernels, PackedWeight, TorchKernels, dequantized
from tests.engine.kernels.guarded import assert_same_bits, guarded, threads


def packed_weight(out_size: int, in_size: int, digits: torch.dtype = torch.float16) -> PackedWeight:
    """Of any steps, with scales that have as many digits as `digits`."""
    values = torch.randint(0, 256, (out_size, in_size // 2), dtype=torch.uint8)
    scales = (0.1 * torch.randn(out_size, in_size // 32, 2)).to(digits).float()
    return PackedWeight(values, guarded(scales))


@settings(max_examples=80, deadline=None)
@given(
    num_rows=st.one_of(st.integers(1, 30), st.integers(1, 300)),
    num_groups=st.integers(1, 50),
    out_size=st.integers(1, 150),
    has_more=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_linear(
    both: CompiledKernels,
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
        result = both.linear(x, weight, bias, residual)
        assert_same_bits(result, both.linear(x, full(weight), bias, residual))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_groups", [1, 18, 27])
@pytest.mark.parametrize("size", [1, 16, 40, 129])
@pytest.mark.parametrize("num_rows", [0, 3, 64, 65, 300])
def test_gated_linear(
    both: CompiledKernels, num_rows: int, size: int, num_groups: int, has_bias: bool
) -> None:
    torch.manual_seed(size)
    weight = packed_weight(2 * size, 32 * num_groups)
    x = guarded(torch.randn(num_rows, 32 * num_groups))
    bias = guarded(torch.randn(2 * size)) if has_bias else None
    result = both.gated_linear(x, weight, bias)
    assert_same_bits(result, both.gated_linear(x, full(weight), bias))


def test_each_number_is_rounded_once(both: CompiledKernels) -> None:
    """Scales of Q4_K have 17 bits and their products with steps 21: then the offset is added."""
    torch.manual_seed(0)
    in_size = 64
    weight = packed_weight(40, in_size, torch.float32)
    exact = steps_of(weight).double() * weight.scales[..., :1].double()
    exact = (exact + weight.scales[..., 1:].double()).flatten(1)
    for kernels in (both, TorchKernels()):
        assert_same_bits(kernels.linear(torch.eye(in_size), weight), exact.float().T.contiguous())


def test_halves_of_bytes_are_in_ggmls_order() -> None:
    low, high = torch.arange(15, -1, -1), torch.arange(16)
    values = (high * 16 + low)[None].to(torch.uint8)
    weight = PackedWeight(values, torch.tensor([[[1.0, 100.0]]]))
    expected = torch.cat((low, high)).float()[None] + 100
    assert torch.equal(dequantized(weight, torch.float32), expected)
    assert weight.shape == (1, 32)


def test_sizes_are_checked(both: CompiledKernels) -> None:
    weight = packed_weight(4, 64)
    for values, scales, what in (
        (weight.values[:, :16], weight.scales, "must be contiguous"),
        (weight.values, weight.scales[:3], "a scale and an offset"),
        (weight.values, weight.scales[..., :1].contiguous(), "a scale and an offset"),
        (weight.values[:, :20].contiguous(), weight.scales, "a scale and an offset"),
    ):
        x = torch.randn(2, values.shape[1] * 2)
        with pytest.raises(RuntimeError, match=what):
            both.linear(x, PackedWeight(values, scales))


def test_who_keeps_them(both: Kernels) -> None:
    assert (both.keeps_packed, TorchKernels().keeps_packed) == (True, False)


def full(weight: PackedWeight) -> Tensor:
    return dequantized(weight, torch.float32)


def steps_of(weight: PackedWeight) -> Tensor:
    groups = weight.values.view(len(weight.values), -1, 16)
    return torch.cat((groups & 15, groups >> 4), dim=-1)
