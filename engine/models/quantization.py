"""Weights in fewer bits: decode is bound by the bytes that it reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.engine_config import Quantization
from engine.kernels import INT8_GROUP, Int8Weight


def quantized(weight: Tensor, how: Quantization) -> Int8Weight:
    """Round to the nearest of 255 steps, which each group of 64 numbers of a row has of its own.

    `weight` is `[out, in]`. Symmetric (the step is the group's largest magnitude / 127), because
    weights lie around 0 and a zero point would cost an addition for each.
    """
    assert how is Quantization.INT8
    out_size, in_size = weight.shape
    groups = F.pad(weight, (0, -in_size % INT8_GROUP)).view(out_size, -1, INT8_GROUP)
    scales = groups.abs().amax(dim=2).to(torch.float32) / 127
    scales.clamp_(min=torch.finfo(torch.float32).tiny)  # of zeros, too
    steps = (groups / scales[..., None]).round_()
    values = steps.to(torch.int8).view(out_size, -1)[:, :in_size].contiguous()
    return Int8Weight(values, scales)
