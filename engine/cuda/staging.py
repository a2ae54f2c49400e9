"""What a step needs on the device goes there in one copy, from pinned memory that is used again.

    pinned, slot 0   | token ids | positions | … |      step n, while slot 1 is being filled
    pinned, slot 1   | token ids | positions | … |      step n + 1
    on the device    | token ids | positions | … |      of the step that is computed

Arrays of the same shapes always come to lie in the same places, so that a CUDA graph finds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.stream import Event, Stream

Arrays = Mapping[str, NDArray[Any]]

_ALIGNMENT = 16  # bytes; kernels read that many at once


def staged_bytes(arrays: Arrays) -> int:
    """How much room these take."""
    return sum(_aligned(array.nbytes) for array in arrays.values())


@dataclass(frozen=True)
class Staged:
    """Arrays of one step, on both sides. `host` may be read until the step has been computed."""

    host: Mapping[str, Tensor]
    device: Mapping[str, Tensor]


@dataclass
class _Slot:
    pinned: Tensor
    free: Event | None = None  # behind the last step that used it


class StagingRing:
    """Used by one thread. Waits, before it fills a slot, for the step that used it last."""

    def __init__(self, stream: Stream, num_bytes: int, num_slots: int = 2) -> None:
        """`num_bytes`: what the arrays of one step take at most."""
        self._stream = stream
        self._slots = [_Slot(stream.pinned(num_bytes)) for _ in range(num_slots)]
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=stream.device)
        self._next = 0

    @contextmanager
    def stage(self, arrays: Arrays) -> Iterator[Staged]:
        """Queue the copy. What is submitted within the block may use both sides."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.free is not None:
            slot.free.synchronize()
        host = _views(slot.pinned, arrays)
        for name, array in arrays.items():
            host[name].numpy()[...] = array
        self._copy(slot.pinned, staged_bytes(arrays))
        yield Staged(host, self.views(arrays))
        slot.free = self._stream.record()

    def views(self, arrays: Arrays) -> dict[str, Tensor]:
        """Where arrays of these shapes lie on the device."""
        return _views(self._buffer, arrays)

    def _copy(self, pinned: Tensor, num_bytes: int) -> None:
        target, source = self._buffer[:num_bytes], pinned[:num_bytes]
        self._stream.submit(lambda: _copy_async(target, source))


def _copy_async(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _views(buffer: Tensor, arrays: Arrays) -> dict[str, Tensor]:
    views, offset = {}, 0
    for name, array in arrays.items():
        data = buffer[offset : offset + array.nbytes]
        assert len(data) == array.nbytes, f"{name} does not fit into {len(buffer)} bytes"
        views[name] = data.view(_torch_dtype(array.dtype)).view(array.shape)
        offset += _aligned(array.nbytes)
    return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return {"int64": torch.int64, "int32": torch.int32}[dtype.name]
