"""Weights as views of the mapped files: nothing is read before it is used, nothing is copied.

Processes that serve the same model on one host share the pages.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels import PACKED_ROWS, PackedWeight
from engine.weights import TensorLocation, WeightIndex, scales_of

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,  # packed
}


class MappedWeights:
    """The tensors that a `WeightIndex` names, on one device and in one dtype.

    On a CPU and if stored in that dtype they are views of the files, else copies.
    """

    def __init__(
        self,
        index: WeightIndex,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        packed: WeightIndex | None = None,
    ) -> None:
        """`packed`: what there is in 4 bits as well, if it shall be used."""
        self.dtype = dtype
        self.device = torch.device(device)
        self._files = _MappedFiles(index)
        self._packed = None if packed is None else _MappedFiles(packed)

    def tensor(self, name: str) -> Tensor:
        return self._files.stacked(name).to(self.device, self.dtype)

    def stacked(self, *names: str) -> Tensor:
        """The tensors one below the other, as if they were one.

        If they lie one after the other in their file, as converted models do, that is a view.
        """
        return self._files.stacked(*names).to(self.device, self.dtype)

    def packed(self, *names: str) -> PackedWeight | None:
        """As `stacked`, if all of them are there in 4 bits, in whole blocks but for the last."""
        if self._packed is None or not all(name in self._packed for name in names):
            return None
        num_rows = [self._files.shape(name)[0] for name in names]
        if any(count % PACKED_ROWS for count in num_rows[:-1]):
            return None
        scales = self._packed.stacked(*(scales_of(name) for name in names))
        return PackedWeight(self._packed.stacked(*names), scales, sum(num_rows))


class _MappedFiles:
    """The tensors of an index as they are stored."""

    def __init__(self, index: WeightIndex) -> None:
        self._index = index
        self._files = {path: _map(path) for path in index.files()}

    def __contains__(self, name: str) -> bool:
        return name in self._index.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._index.shape(name)

    def stacked(self, *names: str) -> Tensor:
        locations = [self._index.location(name) for name in names]
        if not _are_adjacent(locations):
            return torch.cat([self._view(location, location.shape) for location in locations])
        num_rows = sum(location.shape[0] for location in locations)
        return self._view(locations[0], (num_rows, *locations[0].shape[1:]))

    def _view(self, location: TensorLocation, shape: tuple[int, ...]) -> Tensor:
        dtype = _DTYPES[location.dtype]
        num_bytes = math.prod(shape) * dtype.itemsize
        data = self._files[location.path][location.offset : location.offset + num_bytes]
        if location.offset % dtype.itemsize:
            data = data.clone()  # a file that does not align its tensors
        return data.view(dtype).view(shape)


def _map(path: Path) -> Tensor:
    # Privately: writing to a weight would never reach the file.
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _are_adjacent(locations: list[TensorLocation]) -> bool:
    return all(
        after.path == before.path
        and after.offset == before.offset + before.nbytes
        and after.dtype == before.dtype
        and after.shape[1:] == before.shape[1:]
        for before, after in itertools.pairwise(locations)
    )
