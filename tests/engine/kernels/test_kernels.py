"""All kernels against formulas in float64, with inputs that lie amid NaNs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.engine_config import Quantization
from engine.kernels import Int8Weight, Kernels, LinearWeight, dequantized
from engine.models.quantization import quantized
from tests.engine.kernels.guarded import guarded, part_of_wider, threads

ROWS = [0, 1, 2, 5, 6, 7, 8, 9, 12, 13, 24, 25, 47, 95, 96, 97, 128, 129, 200]
SIZES = [  # of the input and of the output
    (1, 1),
    (6, 10),
    (24, 64),
    (64, 24),
    (100, 47),
    (576, 192),
    (768, 33),
    (769, 50),
    (1541, 130),
    (2304, 18),
]
ROUNDING = 4e-6  # of the sum of magnitudes: about 34 units in the last place


def check_linear(
    kernels: Kernels, num_rows: int, weight: LinearWeight, bias: bool, residual: bool
) -> None:
    out_size, in_size = weight.shape
    x = torch.randn(num_rows, in_size)
    full = weight if isinstance(weight, Tensor) else dequantized(weight, torch.float32)
    expected, magnitude = x.double() @ full.double().T, x.double().abs() @ full.double().abs().T
    added = {}
    if bias:
        added["bias"] = guarded(torch.randn(out_size))
    if residual:
        added["residual"] = guarded(torch.randn(num_rows, out_size))
    for term in added.values():
        expected, magnitude = expected + term, magnitude + term.abs()
    before = {name: term.clone() for name, term in added.items()}
    result = kernels.linear(guarded(x), weight, **added)
    assert result.shape == (num_rows, out_size)
    assert result.is_contiguous()
    assert result.dtype == torch.float32
    assert ((result - expected).abs() <= ROUNDING * magnitude).all()
    assert all(torch.equal(term, before[name]) for name, term in added.items())


def weight_of(in_size: int, out_size: int, is_int8: bool) -> LinearWeight:
    weight = torch.randn(out_size, in_size)
    if not is_int8:
        return guarded(weight)
    small = quantized(weight, Quantization.INT8)
    return Int8Weight(guarded(small.values), guarded(small.scales))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("is_int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize(("in_size", "out_size"), SIZES)
def test_linear(kernels: Kernels, in_size: int, out_size: int, is_int8: bool) -> None:
    torch.manual_seed(in_size)
    weight = weight_of(in_size, out_size, is_int8)
    combinations = itertools.cycle(itertools.product((False, True), repeat=2))
    for num_rows in ROWS:
        check_linear(kernels, num_rows, weight, *next(combinations))


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 300),
    in_size=st.integers(1, 1700),
    out_size=st.integers(1, 300),
    is_int8=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    num_threads=st.integers(1, 4),
)
def test_linear_of_any_size(
    kernels: Kernels,
    num_rows: int,
    in_size: int,
    out_size: int,
    is_int8: bool,
    bias: bool,
    residual: bool,
    num_threads: int,
) -> None:
    torch.manual_seed(num_rows)
    weight = weight_of(in_size, out_size, is_int8)
    with threads(num_threads):
        check_linear(kernels, num_rows, weight, bias, residual)


def test_each_output_of_linear_is_of_its_own_row_and_column(kernels: Kernels) -> None:
    """Whole numbers, so that the result is exact."""
    generator = torch.Generator().manual_seed(0)
    for num_rows, in_size, out_size in ((1, 70, 37), (11, 1000, 66), (130, 40, 401)):
        x = torch.randint(-4, 5, (num_rows, in_size), generator=generator).float()
        weight = torch.randint(-4, 5, (out_size, in_size), generator=generator).float()
        expected = (x.double() @ weight.double().T).float()
        assert torch.equal(kernels.linear(guarded(x), guarded(weight)), expected)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1.0])
@pytest.mark.parametrize("size", [1, 8, 15, 16, 17, 64, 576, 1000])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 33])
def test_rms_norm_of_rows(kernels: Kernels, num_rows: int, size: int, eps: float) -> None:
    torch.manual_seed(size)
    x, weight = 3 * torch.randn(num_rows, size), torch.randn(size)
    result = kernels.rms_norm(guarded(x), guarded(weight), eps)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), norm(x, weight, eps), atol=0, rtol=2e-6)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("head_dim", [8, 20, 64, 128])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 1), (7, 3), (150, 9)])
def test_rms_norm_of_some_heads_of_a_wider_tensor(
    kernels: Kernels, num_tokens: int, num_heads: int, head_dim: int
) -> None:
    torch.manual_seed(head_dim)
    x, weight = torch.randn(num_tokens, num_heads, head_dim), torch.randn(head_dim)
    part = part_of_wider(x)
    result = kernels.rms_norm(part, guarded(weight), 1e-6)
    assert result.is_contiguous()
    assert result.shape == x.shape
    torch.testing.assert_close(result.double(), norm(x, weight, 1e-6), atol=0, rtol=2e-6)
    assert torch.equal(part, x)


def test_rms_norm_of_very_small_and_large_numbers(kernels: Kernels) -> None:
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([[1e-18], [1e15]])
    weight = torch.ones(40)
    result = kernels.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(result.double(), norm(x, weight, 1e-6), atol=0, rtol=2e-6)
    assert torch.equal(kernels.rms_norm(torch.zeros(1, 40), weight, 1e-6), torch.zeros(1, 40))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.double(), up.double()
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 100, 1536])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 40])
def test_silu_and_mul(kernels: Kernels, num_rows: int, size: int) -> None:
    torch.manual_seed(size)
    gate, up = 4 * torch.randn(num_rows, size), torch.randn(num_rows, size)
    result = kernels.silu_and_mul(guarded(torch.cat((gate, up), dim=-1)))
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), swiglu(gate, up), atol=0, rtol=2e-6)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("in_size", [64, 70, 576, 900])
@pytest.mark.parametrize("size", [1, 15, 16, 40, 129])
@pytest.mark.parametrize("num_rows", [0, 3, 64, 65, 300])
def test_gated_linear(
    kernels: Kernels, num_rows: int, size: int, in_size: int, has_bias: bool
) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(num_rows, in_size), torch.randn(2 * size, in_size) / in_size**0.5
    bias = torch.randn(2 * size) if has_bias else None
    result = kernels.gated_linear(guarded(x), guarded(weight), bias)
    gate_up = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    expected = swiglu(*gate_up.chunk(2, dim=-1))
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_silu_and_mul_of_gates_from_the_smallest_to_the_largest(kernels: Kernels) -> None:
    """Beyond -87 a gate lets nothing through; how nearly nothing does not matter."""
    gate = torch.cat((torch.linspace(-80, 80, 4001), torch.tensor([0.0, -0.0, 1e-38, 1e30, 3e38])))
    ones = torch.ones_like(gate)
    result = kernels.silu_and_mul(torch.cat((gate, ones))[None])[0].double()
    torch.testing.assert_close(result, swiglu(gate, ones), atol=1e-44, rtol=2e-6)
    closed = -torch.logspace(1.92, 20, 500)  # from -83 on
    result = kernels.silu_and_mul(torch.cat((closed, torch.ones_like(closed)))[None])[0]
    assert result.isfinite().all()
    assert (result.abs() <= 2e-35 * closed.abs()).all()


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.double().chunk(2, dim=-1)
    pairs = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 80, 128])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 1), (7, 3), (150, 9)])
def test_rotate_touches_only_its_own_heads(
    kernels: Kernels, num_tokens: int, num_heads: int, head_dim: int
) -> None:
    torch.manual_seed(head_dim)
    wide = torch.randn(num_tokens, num_heads + 5, head_dim)
    angles = 100 * torch.randn(num_tokens, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    result = guarded(wide)
    heads = result[:, 2 : 2 + num_heads]
    returned = kernels.rotate(heads, guarded(cos), guarded(sin))
    assert returned.data_ptr() == heads.data_ptr()
    assert returned.shape == heads.shape
    expected = turned(wide[:, 2 : 2 + num_heads], cos, sin)
    torch.testing.assert_close(heads.double(), expected, atol=2e-6, rtol=2e-6)
    for beside in (slice(0, 2), slice(2 + num_heads, None)):
        assert torch.equal(result[:, beside], wide[:, beside])
    memory = torch.as_strided(result, (result.numel() + 2 * 77,), (1,), 0)
    assert memory[:77].isnan().all()
    assert memory[-77:].isnan().all()
