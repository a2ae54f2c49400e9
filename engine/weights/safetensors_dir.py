"""Where each tensor of a Hugging Face directory lies, known without reading a single weight.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the bytes
of all tensors without gaps. Reading the headers alone tells whether anything is missing, cut off
or of the wrong shape, before a framework is even imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.weights.config import ModelConfig
from engine.weights.model_tensors import Shape, is_redundant, tensor_shapes
from protocol import ModelError

SINGLE_FILE = "model.safetensors"
PACKED_FILE = "packed.safetensors"  # what of a converted model there is in 4 bits, too
SHARD_INDEX = "model.safetensors.index.json"

LOADABLE_DTYPES = ("BF16", "F16", "F32", "F64")

_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """One tensor: `nbytes` bytes from `offset` (counted from the start of the file) in `path`."""

    path: Path
    dtype: str  # as safetensors spells it: F32, BF16, ...
    shape: Shape
    offset: int
    nbytes: int


class WeightIndex:
    """Tensor name → location, over one file or many shards."""

    def __init__(self, locations: Mapping[str, TensorLocation]) -> None:
        self._locations = dict(locations)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, sorted."""
        return tuple(sorted(self._locations))

    def shape(self, name: str) -> Shape:
        """The shape of a tensor; KeyError for a name that is not in `names`."""
        return self._locations[name].shape

    def dtype(self, name: str) -> str:
        """The dtype as safetensors spells it (`F32`, `F16`, `BF16`, ...)."""
        return self._locations[name].dtype

    def location(self, name: str) -> TensorLocation:
        """Where the bytes of a tensor lie."""
        return self._locations[name]

    def files(self) -> dict[Path, list[str]]:
        """The files to open, each with the tensors to take from it in the order of their bytes."""
        files: dict[Path, list[str]] = {}
        for name, where in sorted(self._locations.items(), key=lambda item: item[1].offset):
            files.setdefault(where.path, []).append(name)
        return files

    def check(self, config: ModelConfig, directory: Path) -> None:
        """Compare with what the model needs.

        Raises ModelError for a tensor that is missing, superfluous, of the wrong shape (naming it
        and both shapes) or of a dtype that is no floating-point number of 16 bits or more.
        """
        expected = tensor_shapes(config)
        for name, shape in expected.items():
            where = self._locations.get(name)
            if where is None:
                raise _broken(directory, f"tensor {name} {list(shape)} is missing")
            if where.shape != shape:
                raise _broken(
                    where.path,
                    f"tensor {name} has shape {list(where.shape)}, but config.json says"
                    f" {list(shape)}",
                )
            if where.dtype not in LOADABLE_DTYPES:
                raise _broken(
                    where.path,
                    f"tensor {name} has dtype {where.dtype}, which cannot be loaded; known:"
                    f" {', '.join(LOADABLE_DTYPES)}",
                )
        for name in self._locations.keys() - expected.keys():
            if not is_redundant(name, config):
                raise _broken(
                    self._locations[name].path,
                    f"tensor {name} {list(self.shape(name))} has no place in a"
                    f" {config.architecture} with this config.json",
                )


def open_weights(directory: Path) -> WeightIndex:
    """Index the safetensors of a Hugging Face directory, one file or many shards.

    Raises ModelError: no safetensors, a shard missing, a header that does not parse, a file that
    is cut off or longer than its header says.
    """
    if (directory / SINGLE_FILE).is_file():
        return WeightIndex(_read_header(directory / SINGLE_FILE))
    if (directory / SHARD_INDEX).is_file():
        return WeightIndex(_read_shards(directory / SHARD_INDEX))
    raise _broken(
        directory, f"has neither {SINGLE_FILE} nor {SHARD_INDEX}; only safetensors can be loaded"
    )


def open_packed(directory: Path) -> WeightIndex | None:
    """Index what is there of a converted model in 4 bits as well: for each name its values, and its
    scales (`scales_of`), as `engine.weights.packed_blocks` lays them out.

    Raises ModelError: the file is broken.
    """
    path = directory / PACKED_FILE
    return WeightIndex(_read_header(path)) if path.is_file() else None


def scales_of(name: str) -> str:
    """Under which the scales of a packed tensor are kept."""
    return f"{name}.scales"


class _ShardIndexJson(msgspec.Struct):
    weight_map: dict[str, str]


class _EntryJson(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # from the end of the header


def _read_shards(index_path: Path) -> dict[str, TensorLocation]:
    try:
        index = msgspec.json.decode(index_path.read_bytes(), type=_ShardIndexJson)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _broken(index_path, f"not a shard index: {error}") from error
    locations: dict[str, TensorLocation] = {}
    for file_name in sorted(set(index.weight_map.values())):
        if Path(file_name).name != file_name:
            raise _broken(index_path, f"names the shard {file_name!r}, which is not a file name")
        locations |= _read_header(index_path.parent / file_name)
    for name, file_name in index.weight_map.items():
        if name not in locations or locations[name].path.name != file_name:
            raise _broken(index_path, f"says that {file_name} holds {name}, but it does not")
    return locations


def _read_header(path: Path) -> dict[str, TensorLocation]:
    entries, data_start, file_size = _parse_header(path)
    locations: dict[str, TensorLocation] = {}
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        nbytes = _nbytes(path, name, entry)
        begin, end = entry.data_offsets
        if data_start + begin != position or end - begin != nbytes:
            raise _broken(path, f"the header's offsets of {name} do not fit its shape and dtype")
        locations[name] = TensorLocation(path, entry.dtype, tuple(entry.shape), position, nbytes)
        position += nbytes
    if position != file_size:
        raise _broken(
            path, f"has {file_size} bytes where its header promises {position}; fetch it again"
        )
    return locations


def _parse_header(path: Path) -> tuple[dict[str, _EntryJson], int, int]:
    """The entries, where the tensors' bytes start, and how long the file is."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            content = file.read(size) if size <= _MAX_HEADER_BYTES else b""
        file_size = path.stat().st_size
    except OSError as error:
        raise _broken(path, f"cannot be read: {error.strerror}") from error
    if size == 0 or len(content) != size:
        raise _broken(path, "not a safetensors file, or cut off in its header; fetch it again")
    try:
        raw = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(e, type=_EntryJson) for name, e in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _broken(path, f"the safetensors header does not parse: {error}") from error
    return entries, 8 + size, file_size


def _nbytes(path: Path, name: str, entry: _EntryJson) -> int:
    if entry.dtype not in _DTYPE_BYTES:
        raise _broken(path, f"tensor {name} has the unknown dtype {entry.dtype!r}")
    if any(size < 0 for size in entry.shape):
        raise _broken(path, f"tensor {name} has the impossible shape {entry.shape}")
    return math.prod(entry.shape) * _DTYPE_BYTES[entry.dtype]


def _broken(path: Path, what: str) -> ModelError:
    return ModelError(f"{path}: {what}", path=str(path))
