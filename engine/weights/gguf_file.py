"""A GGUF file: its metadata and where its tensors lie. Knows the container, and no model.

    magic "GGUF" · version · tensor count · metadata count
    metadata:  key · type · value                            (repeated)
    tensors:   name · rank · sizes · type · offset           (repeated)
    padding to `general.alignment`
    the tensors' bytes, each at its offset from here

All numbers are little endian; a string is a 64-bit length and UTF-8. Sizes go from the innermost
dimension outwards; `GGUFTensor.shape` has them the usual way round.
Source: the specification in ggml's docs/gguf.md. The `gguf` package has a reader too, but it takes
seconds for a vocabulary and answers a file that was cut off with whatever NumPy raises.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.weights.model_tensors import Shape
from protocol import ModelError

Scalar = str | bool | int | float
Metadata = Mapping[str, Scalar | list[Scalar]]

_T = TypeVar("_T", str, bool, int, float)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_RANK = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor. `shape` is `[..., rows, columns]`; `offset` counts from the start of the file."""

    name: str
    shape: Shape
    type: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """A parsed GGUF file, mapped into memory as long as this object or one of its arrays lives."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError: not GGUF, an unknown version, or broken or cut off anywhere."""
        self.path = path
        self._bytes = _map(path)
        cursor = _Cursor(path, self._bytes)
        num_tensors, num_metadata = _read_start(cursor)
        self.metadata: Metadata = _read_metadata(cursor, num_metadata)
        self.tensors: Mapping[str, GGUFTensor] = self._read_tensors(cursor, num_tensors)

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """A metadata value, None if it is absent. Raises ModelError if it is of another kind."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.broken(f"metadata {key} is {type(value).__name__}, not {kind.__name__}")
        return value

    def require(self, key: str, kind: type[_T]) -> _T:
        """Like `get`, but absence is a ModelError too."""
        value = self.get(key, kind)
        if value is None:
            raise self.broken(f"metadata {key} is missing")
        return value

    def get_list(self, key: str, kind: type[_T]) -> list[_T] | None:
        """A metadata array whose items are of the given kind, None if it is absent."""
        values = self.metadata.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self.broken(f"metadata {key} is not a list of {kind.__name__}")
        return values  # type: ignore[return-value]  # every item was just looked at

    def raw_rows(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The bytes of the tensor's rows, `[..., rows, bytes of a row]`."""
        raw = np.frombuffer(self._bytes, np.uint8, tensor.nbytes, tensor.offset)
        return raw.reshape(*tensor.shape[:-1], -1)

    def dequantize(self, tensor: GGUFTensor) -> NDArray[np.float32]:
        """The tensor in float32, of `tensor.shape`.

        Raises ModelError for a type that the `gguf` package cannot dequantise.
        """
        try:
            values = gguf.quants.dequantize(self.raw_rows(tensor), tensor.type)
        except NotImplementedError as error:
            raise self.broken(
                f"tensor {tensor.name} has type {tensor.type.name}, which cannot be dequantised;"
                " use a file quantised as Q8_0, Q4_K or Q6_K, or in F16"
            ) from error
        return values.astype(np.float32, copy=False).reshape(tensor.shape)

    def broken(self, what: str) -> ModelError:
        """The error that says what is wrong with this file."""
        return ModelError(f"{self.path}: {what}", path=str(self.path))

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
        heads = [_read_tensor_head(cursor) for _ in range(count)]
        alignment = self.get("general.alignment", int) or _DEFAULT_ALIGNMENT
        if alignment < 0:
            raise self.broken(f"corrupt: general.alignment is {alignment}")
        data_start = cursor.position + -cursor.position % alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_number, offset in heads:
            kind, nbytes = self._sized(name, shape, type_number)
            if data_start + offset + nbytes > len(self._bytes):
                raise self.broken(f"cut off: tensor {name} lies beyond its end; fetch it again")
            tensors[name] = GGUFTensor(name, shape, kind, data_start + offset, nbytes)
        return tensors

    def _sized(
        self, name: str, shape: Shape, type_number: int
    ) -> tuple[gguf.GGMLQuantizationType, int]:
        try:
            kind = gguf.GGMLQuantizationType(type_number)
        except ValueError as error:
            raise self.broken(f"tensor {name} has the unknown type {type_number}") from error
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise self.broken(
                f"tensor {name} has rows of {shape[-1]}, not a multiple of {kind.name}'s"
                f" {block_size}"
            )
        return kind, math.prod(shape) // block_size * block_bytes


class _Cursor:
    """Reads the head of the file from left to right, and never beyond its end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self._content = content

    def take(self, nbytes: int) -> bytes:
        start, end = self.position, self.position + nbytes
        if end > len(self._content):
            raise self.broken("cut off or corrupt; fetch it again")
        self.position = end
        return self._content[start:end]

    def number(self, code: str) -> int:
        return int(self.scalar(code))

    def scalar(self, code: str) -> bool | int | float:
        value: bool | int | float = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        return value

    def scalars(self, code: str, count: int) -> list[Scalar]:
        content = self.take(count * struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code}", content))

    def string(self) -> str:
        content = self.take(self.number("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"corrupt: a string is not UTF-8 ({error})") from error

    def broken(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}", path=str(self.path))


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    except ValueError as error:
        raise ModelError(f"{path}: is empty; fetch it again", path=str(path)) from error


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """The counts of tensors and of metadata."""
    if cursor.take(4) != _MAGIC:
        raise cursor.broken("not a GGUF file")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise cursor.broken(f"GGUF version {version} (little endian) is not one of {_VERSIONS}")
    return cursor.number("Q"), cursor.number("Q")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Scalar | list[Scalar]]:
    metadata: dict[str, Scalar | list[Scalar]] = {}
    for _ in range(count):
        key = cursor.string()
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Scalar | list[Scalar]:
    kind = cursor.number("I")
    if kind != _ARRAY:
        return _read_scalar(cursor, key, kind)
    item_kind, count = cursor.number("I"), cursor.number("Q")
    if item_kind == _STRING:
        return [cursor.string() for _ in range(count)]
    if item_kind in _SCALARS:
        return cursor.scalars(_SCALARS[item_kind], count)
    raise cursor.broken(f"corrupt: metadata {key} is an array of the unknown type {item_kind}")


def _read_scalar(cursor: _Cursor, key: str, kind: int) -> Scalar:
    if kind == _STRING:
        return cursor.string()
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    raise cursor.broken(f"corrupt: metadata {key} has the unknown type {kind}")


def _read_tensor_head(cursor: _Cursor) -> tuple[str, Shape, int, int]:
    """Name, shape, type and offset from the start of the data."""
    name = cursor.string()
    rank = cursor.number("I")
    if not 1 <= rank <= _MAX_RANK:
        raise cursor.broken(f"corrupt: tensor {name} has {rank} dimensions")
    sizes = tuple(cursor.number("Q") for _ in range(rank))
    if 0 in sizes:
        raise cursor.broken(f"corrupt: tensor {name} has the empty shape {list(sizes)}")
    return name, sizes[::-1], cursor.number("I"), cursor.number("Q")
