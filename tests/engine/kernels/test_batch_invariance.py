"""A row gets the same bits alone, in any batch, and with any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.engine_config import Quantization
from engine.kernels import CompiledKernels, LinearWeight, dequantized
from engine.models.quantization import quantized
from tests.engine.kernels.guarded import assert_same_bits, part_of_wider, threads
from tests.engine.kernels.test_packed import packed_weight

THREADS = st.integers(1, 4)


@st.composite
def cuts(draw: st.DrawFn, num_rows: int) -> list[tuple[int, int]]:
    """All rows, in pieces."""
    ends = draw(st.lists(st.integers(1, num_rows), max_size=4, unique=True))
    ends = sorted({*ends, num_rows})
    return list(zip([0, *ends], ends, strict=False))


def check(data: st.DataObject, num_rows: int, compute: Callable[[slice], Tensor]) -> None:
    """`compute` gives the results of a slice of the rows."""
    with threads(data.draw(THREADS)):
        whole = compute(slice(0, num_rows))
    for start, end in data.draw(cuts(num_rows)):
        with threads(data.draw(THREADS)):
            assert_same_bits(compute(slice(start, end)), whole[start:end])
    alone = data.draw(st.integers(0, num_rows - 1))
    with threads(data.draw(THREADS)):
        assert_same_bits(compute(slice(alone, alone + 1)), whole[alone : alone + 1])


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    num_rows=st.one_of(st.integers(1, 30), st.integers(1, 300)),
    in_size=st.integers(1, 1700),
    out_size=st.integers(1, 200),
    kind=st.sampled_from(["float32", "int8", "packed"]),
    has_more=st.booleans(),
)
def test_linear(
    invariant: CompiledKernels,
    data: st.DataObject,
    num_rows: int,
    in_size: int,
    out_size: int,
    kind: str,
    has_more: bool,
) -> None:
    torch.manual_seed(num_rows)
    if kind == "packed":
        in_size += -in_size % 32
    full = torch.randn(out_size, in_size)
    weight: LinearWeight = full
    if kind == "int8":
        weight = quantized(full, Quantization.INT8)
    elif kind == "packed":
        weight = packed_weight(out_size, in_size)
    x, bias = torch.randn(num_rows, in_size), torch.randn(out_size) if has_more else None
    residual = torch.randn(num_rows, out_size)

    def compute(rows: slice) -> Tensor:
        return invariant.linear(x[rows], weight, bias, residual[rows] if has_more else None)

    check(data, num_rows, compute)


@pytest.mark.parametrize(("in_size", "out_size"), [(576, 960), (1536, 576), (576, 3072)])
def test_linear_of_a_real_size(invariant: CompiledKernels, in_size: int, out_size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(600, in_size), torch.randn(out_size, in_size)
    whole = invariant.linear(x, weight)
    for num_rows in (1, 2, 7, 24, 25, 96, 97, 300):
        for num_threads in (1, 2, 4):
            with threads(num_threads):
                result = invariant.linear(x[100 : 100 + num_rows], weight)
                assert_same_bits(result, whole[100 : 100 + num_rows])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 130), in_size=st.integers(1, 800))
def test_bytes_give_the_bits_of_the_numbers_that_they_stand_for(
    invariant: CompiledKernels, data: st.DataObject, num_rows: int, in_size: int
) -> None:
    torch.manual_seed(in_size)
    weight = quantized(torch.randn(data.draw(st.integers(1, 70)), in_size), Quantization.INT8)
    x = torch.randn(num_rows, in_size)
    expected = invariant.linear(x, dequantized(weight, torch.float32))
    assert_same_bits(invariant.linear(x, weight), expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_tokens=st.integers(1, 300), head_dim=st.sampled_from([8, 20, 64, 80]))
def test_what_is_done_to_each_token(
    invariant: CompiledKernels, data: st.DataObject, num_tokens: int, head_dim: int
) -> None:
    torch.manual_seed(num_tokens)
    heads, gate_up = torch.randn(num_tokens, 3, head_dim), torch.randn(num_tokens, 2 * head_dim + 6)
    cos, sin = torch.randn(2, num_tokens, head_dim // 2)
    weight, wide = torch.randn(head_dim), part_of_wider(heads)
    check(data, num_tokens, lambda rows: invariant.rms_norm(wide[rows], weight, 1e-5))
    check(data, num_tokens, lambda rows: invariant.silu_and_mul(gate_up[rows]))
    check(
        data,
        num_tokens,
        lambda rows: invariant.rotate(part_of_wider(heads[rows]), cos[rows], sin[rows]),
    )


class TestWithoutAskingForIt:
    """What is faster in another way for many rows is computed in that way; all else is the same."""

    @pytest.mark.parametrize("num_rows", [1, 2, 7, 24, 60, 63])
    def test_few_rows(
        self, usual: CompiledKernels, invariant: CompiledKernels, num_rows: int
    ) -> None:
        torch.manual_seed(0)
        x, weight, bias = torch.randn(95, 800), torch.randn(130, 800), torch.randn(130)
        whole = invariant.linear(x, weight, bias)
        assert_same_bits(usual.linear(x[:num_rows], weight, bias), whole[:num_rows])

    def test_bytes(self, usual: CompiledKernels, invariant: CompiledKernels) -> None:
        torch.manual_seed(0)
        weight = quantized(torch.randn(70, 800), Quantization.INT8)
        x = torch.randn(300, 800)
        assert_same_bits(usual.linear(x[200:263], weight), invariant.linear(x, weight)[200:263])

    def test_each_says_what_it_promises(
        self, usual: CompiledKernels, invariant: CompiledKernels
    ) -> None:
        assert (usual.batch_invariant, invariant.batch_invariant) == (False, True)
