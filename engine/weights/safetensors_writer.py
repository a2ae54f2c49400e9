"""Writes one safetensors file of float32 tensors, of which memory never holds more than one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.weights.model_tensors import Shape

_ALIGNMENT = 64  # a cache line, so that mapped tensors start on one; the format asks for 8


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, NDArray[np.float32]]],
    metadata: Mapping[str, str],
) -> None:
    """Write `tensors`, which must come in the order of `shapes`; returns once they are on disk."""
    with path.open("wb") as file:
        file.write(_header(shapes, metadata))
        for (name, tensor), expected in zip(tensors, shapes, strict=True):
            assert name == expected, (name, expected)
            assert tensor.shape == shapes[name], (name, tensor.shape)
            file.write(np.ascontiguousarray(tensor, dtype="<f4").data)
        file.flush()
        # The directory is renamed into place next, and that must never outrun the bytes.
        os.fsync(file.fileno())


def float32_bytes(shapes: Mapping[str, Shape]) -> int:
    """Bytes that these tensors take in float32."""
    return sum(_nbytes(shape) for shape in shapes.values())


def _header(shapes: Mapping[str, Shape], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    entries |= dict(_entries(shapes))
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-(8 + len(content)) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content


def _entries(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, object]]:
    begin = 0
    for name, shape in shapes.items():
        end = begin + _nbytes(shape)
        yield name, {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
        begin = end


def _nbytes(shape: Shape) -> int:
    return 4 * math.prod(shape)
