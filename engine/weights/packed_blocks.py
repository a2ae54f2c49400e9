"""GGUF's blocks of 4 bits in one layout: what a kernel can compute with as it is.

    types   Q4_0, Q4_1   32 numbers, which have one scale (and offset)
            Q4_K         256 numbers, of which each 32 have a scale and an offset

A number is `scale * steps + offset`, rounded to float32 once: the product is exact (a scale has 17
bits at most, the steps have 4), and so it is the number that dequantising gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engine.weights.model_tensors import Shape

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_Number = TypeVar("_Number", np.uint8, np.float32)

_GROUP = 32  # numbers that share a scale and an offset
_ROWS = 16  # that lie side by side
_K_BLOCK_GROUPS = 8


def can_pack(kind: GGMLQuantizationType) -> bool:
    """Whether `pack` knows the type."""
    return kind in _PACKERS


def packed_shapes(shape: Shape) -> tuple[Shape, Shape]:
    """The shapes that values and scales of a tensor `[rows, columns]` have side by side."""
    num_rows, num_columns = shape
    blocks, groups = -(-num_rows // _ROWS), num_columns // _GROUP
    return (blocks, groups, _GROUP // 2, _ROWS), (blocks, groups, 2, _ROWS)


def pack(rows: Bytes, kind: GGMLQuantizationType) -> tuple[Bytes, Floats]:
    """Values `[rows, columns / 32, 16]`, and scales `[rows, columns / 32, scale | offset]`.

    The low halves of a group's 16 bytes are its first 16 numbers. `rows` is `[rows, bytes of a
    row]`, of a type that can be packed.
    """
    blocks = rows.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    values, scales = _PACKERS[kind](blocks)
    return values.reshape(len(rows), -1, _GROUP // 2), scales.reshape(len(rows), -1, 2)


def side_by_side(rows: NDArray[_Number]) -> NDArray[_Number]:
    """`[rows, groups, n]` → `[rows / 16, groups, n, 16]`, filled up with rows of zeros."""
    filled = np.pad(rows, ((0, -len(rows) % _ROWS), (0, 0), (0, 0)))
    return filled.reshape(-1, _ROWS, *rows.shape[1:]).transpose(0, 2, 3, 1)


def _pack_q4_0(blocks: Bytes) -> tuple[Bytes, Floats]:
    scale = _halves(blocks[:, :2])
    return blocks[:, 2:], np.concatenate((scale, -8 * scale), axis=1)


def _pack_q4_1(blocks: Bytes) -> tuple[Bytes, Floats]:
    return blocks[:, 4:], _halves(blocks[:, :4])


def _pack_q4_k(blocks: Bytes) -> tuple[Bytes, Floats]:
    steps, least = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    scale = _halves(blocks[:, :2]) * steps.astype(np.float32)
    offset = -_halves(blocks[:, 2:4]) * least.astype(np.float32)
    # 32 bytes have two groups, one in all low halves and one in all high ones.
    pairs = blocks[:, 16:].reshape(-1, _K_BLOCK_GROUPS // 2, 2, _GROUP // 2)
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    low = (first & 15) | (second & 15) << 4
    high = first >> 4 | second & 0xF0
    values = np.stack((low, high), axis=2)
    return values, np.stack((scale, offset), axis=-1)


def _halves(content: Bytes) -> Floats:
    return np.ascontiguousarray(content).view("<f2").astype(np.float32)


_PACKERS: Mapping[GGMLQuantizationType, Callable[[Bytes], tuple[Bytes, Floats]]] = {
    GGMLQuantizationType.Q4_0: _pack_q4_0,
    GGMLQuantizationType.Q4_1: _pack_q4_1,
    GGMLQuantizationType.Q4_K: _pack_q4_k,
}
