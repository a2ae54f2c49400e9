"""Writes one safetensors file, of whose tensors memory never holds more than one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.weights.model_tensors import Shape

_FLOAT, _BYTE = np.dtype("<f4"), np.dtype("u1")
_NAMES = {_FLOAT: "F32", _BYTE: "U8"}
_ALIGNMENT = 64  # a cache line, so that mapped tensors start on one; the format asks for 8


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, NDArray[np.float32] | NDArray[np.uint8]]],
    metadata: Mapping[str, str],
    *,
    of_bytes: Set[str] = frozenset(),
) -> None:
    """Write `tensors`, which must come in the order of `shapes`; returns once they are on disk.

    Those in `of_bytes` have numbers of 8 bits, the others are float32.
    """
    dtypes = {name: _BYTE if name in of_bytes else _FLOAT for name in shapes}
    with path.open("wb") as file:
        file.write(_header(shapes, dtypes, metadata))
        for (name, tensor), expected in zip(tensors, shapes, strict=True):
            assert name == expected, (name, expected)
            assert tensor.shape == shapes[name], (name, tensor.shape)
            file.write(np.ascontiguousarray(tensor, dtype=dtypes[name]).data)
        file.flush()
        # The directory is renamed into place next, and that must never outrun the bytes.
        os.fsync(file.fileno())


def float32_bytes(shapes: Mapping[str, Shape]) -> int:
    """Bytes that these tensors take in float32."""
    return sum(_nbytes(shape, _FLOAT) for shape in shapes.values())


def _header(
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, np.dtype[Any]],
    metadata: Mapping[str, str],
) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    entries |= dict(_entries(shapes, dtypes))
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-(8 + len(content)) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content


def _entries(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, np.dtype[Any]]
) -> Iterator[tuple[str, object]]:
    begin = 0
    for name, shape in shapes.items():
        end = begin + _nbytes(shape, dtypes[name])
        dtype = _NAMES[dtypes[name]]
        yield name, {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        begin = end


def _nbytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    return dtype.itemsize * math.prod(shape)
