"""The kernels in plain PyTorch: for devices other than a CPU, and for a CPU without a compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.kernels import INT8_GROUP, Int8Weight, LinearWeight, PackedWeight

# Limits that were measured with MKL in float32 on two cores with AVX-512.
_FEW_ROWS = 8
_MANY_ROWS = 128
_NUM_STRIPS = 8


class TorchKernels:
    """See `engine.kernels.Kernels`."""

    name = "torch"
    keeps_packed = False  # each use would cost a dense copy

    def linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(weight, Tensor):
            weight = dequantized(weight, x.dtype)
        product = _linear(x, weight, bias)
        return product if residual is None else product.add_(residual)

    def gated_linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return heads.copy_(rotated)


def dequantized(weight: Int8Weight | PackedWeight, dtype: torch.dtype) -> Tensor:
    """The numbers that the weight stands for, `[out, in]`."""
    if isinstance(weight, PackedWeight):
        return _unpacked(weight).to(dtype)
    in_size = weight.values.shape[1]
    scales = weight.scales.to(dtype).repeat_interleave(INT8_GROUP, dim=1)[:, :in_size]
    return weight.values.to(dtype).mul_(scales)


def _unpacked(weight: PackedWeight) -> Tensor:
    steps = torch.cat((weight.values & 15, weight.values >> 4), dim=2).to(torch.float64)
    scales = weight.scales.to(torch.float64)
    numbers = (steps * scales[:, :, :1] + scales[:, :, 1:]).to(torch.float32)  # rounded once
    return numbers.permute(0, 3, 1, 2).reshape(-1, weight.shape[1])[: weight.num_rows].contiguous()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Below about 128 rows `F.linear` uses one core only on a CPU, whatever it is given. Written in
    another way the same product is up to 4 times faster for a few rows, and 1.3 times for some.
    """
    num_rows, (out_size, in_size) = len(x), weight.shape
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if num_rows <= 2 or (num_rows <= _FEW_ROWS and out_size >= in_size):
        product = _weight_first(x, weight)
    elif num_rows <= _MANY_ROWS and out_size % _NUM_STRIPS == 0 and torch.get_num_threads() > 1:
        product = _in_strips(x, weight)
    else:
        return F.linear(x, weight, bias)
    return product if bias is None else product.add_(bias)


def _weight_first(x: Tensor, weight: Tensor) -> Tensor:
    """W xᵀ: nearly all time goes into reading the weight, and all cores read."""
    num_rows = len(x)
    if num_rows == 1:
        x = torch.cat((x, x))  # a matrix times one vector takes a slower path than times two
    return torch.mm(weight, x.t()).t()[:num_rows].contiguous()


def _in_strips(x: Tensor, weight: Tensor) -> Tensor:
    """A batch of products, one for each strip of the weight's rows, shared among the cores."""
    strips = weight.view(_NUM_STRIPS, -1, weight.shape[1]).transpose(1, 2)
    products = torch.bmm(x.expand(_NUM_STRIPS, -1, -1), strips)  # [strip, row, out of strip]
    return products.transpose(0, 1).reshape(len(x), -1).contiguous()  # strips of one row are a view
