"""A CPU with narrower vectors computes the same bits, if it has fused multiply-adds as well."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.attention import CompiledAttention
from engine.engine_config import Quantization
from engine.kernels import CompiledKernels, PackedWeight
from engine.kernels.build import build
from engine.models.quantization import quantized
from tests.engine.attention.ragged import Ragged, Shape
from tests.engine.kernels.guarded import assert_same_bits


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX-512"
)
def test_avx2_gives_the_bits_of_avx512(
    invariant: CompiledKernels, tmp_path_factory: pytest.TempPathFactory
) -> None:
    module = build(tmp_path_factory.mktemp("kernels"), "AVX2")
    narrow = CompiledKernels(module, batch_invariant=True)
    expected = everything(invariant)
    for name, result in everything(narrow).items():
        assert result.isfinite().all(), name
        assert_same_bits(result, expected[name])


def everything(kernels: CompiledKernels) -> dict[str, Tensor]:
    """Results of each kernel, in odd and even sizes."""
    torch.manual_seed(0)
    results = {}
    for num_rows, in_size, out_size in ((1, 576, 192), (13, 1541, 130), (130, 103, 46)):
        x, weight = torch.randn(num_rows, in_size), torch.randn(out_size, in_size)
        bias, residual = torch.randn(out_size), torch.randn(num_rows, out_size)
        size = f"{num_rows}, {in_size}, {out_size}"
        results[f"linear {size}"] = kernels.linear(x, weight, bias, residual)
        packed = quantized(weight, Quantization.INT8)
        results[f"int8 {size}"] = kernels.linear(x, packed, bias, residual)
        groups = -(-in_size // 32)
        blocks = -(-out_size // 16)
        values = torch.randint(0, 256, (blocks, groups, 16, 16), dtype=torch.uint8)
        halves = PackedWeight(values, torch.randn(blocks, groups, 2, 16), out_size)
        wide = torch.randn(num_rows, groups * 32)
        results[f"packed {size}"] = kernels.linear(wide, halves, bias, residual)
        results[f"rms_norm {size}"] = kernels.rms_norm(x, torch.randn(in_size), 1e-5)
        gate_up = 20 * torch.randn(num_rows, 2 * in_size)
        results[f"silu_and_mul {size}"] = kernels.silu_and_mul(gate_up)
    for head_dim in (8, 20, 64, 80):
        heads, cos_sin = torch.randn(40, 3, head_dim), torch.randn(2, 40, head_dim // 2)
        results[f"rotate {head_dim}"] = kernels.rotate(heads, cos_sin[0], cos_sin[1])
        for dtype, window in (("float32", None), ("bfloat16", None), ("float32", 70)):
            shape = Shape(head_dim=head_dim, dtype=dtype)
            results[f"attention {head_dim}, {dtype}, {window}"] = attend(kernels, shape, window)
    return results


def attend(kernels: CompiledKernels, shape: Shape, window: int | None) -> Tensor:
    lengths = [random.Random(0).randrange(1, 200), 37, 700]
    ragged = Ragged(shape, lengths)
    pieces = [(0, 0, lengths[0]), (1, 36, 37), (2, 690, 700)]
    for index, start, _ in pieces:
        ragged.write(index, start)
    attention = CompiledAttention(kernels, ragged.cache, ragged.metadata(pieces))
    return attention(ragged.layer, *ragged.inputs(pieces), window=window)
