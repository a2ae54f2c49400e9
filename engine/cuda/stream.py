"""The seam to a device with a queue: work is done in order, and events tell how far it is.

host      submit a │ submit b │ record e │ …        goes on at once
device    ……… a ………………│……… b ………│ e            e.synchronize() returns here
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from protocol import ConfigError

_LEAST_CAPABILITY = (8, 0)  # of what both kinds of attention kernels are written for


class Event(Protocol):
    """A place in the queue."""

    def query(self) -> bool:
        """Whether all before it has been done."""

    def synchronize(self) -> None:
        """Return when all before it has been done; the device goes on meanwhile."""


class Graph(Protocol):
    """Work that was captured once, over tensors that stay where they are."""

    def replay(self) -> None:
        """Queue it once more; only within work that is submitted."""


class Stream(Protocol):
    """One queue. All that a runner does on its device goes through it, in order."""

    @property
    def device(self) -> torch.device: ...

    def submit(self, work: Callable[[], None]) -> None:
        """Queue what `work` does to tensors of the device.

        `work` reads nothing from the device. It may run now or later, but before any that is
        submitted after it; what it reads on the host must stay as it is until it has been done.
        """

    def record(self) -> Event:
        """An event behind all that has been submitted; within work, behind what it has queued."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory `[num_bytes]` of uint8 that the device copies from by itself."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Queue a copy to the host, within work. To be read behind an event that comes after."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Do the work once, and note what it queues."""


class CudaStream:
    """A stream of one CUDA device, and one pool of memory for all graphs that it captures.

    Raises ConfigError: there is no such device, or it is too old.
    """

    def __init__(self, device: str = "cuda") -> None:
        """`device`: cuda, or cuda:N."""
        self.device = torch.device("cuda", _index_of(device))
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        # Who waits for it sleeps, instead of burning a core that others could use.
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Graph:
        self.submit(work)  # libraries set themselves up when they are first called
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads that move KV may call CUDA meanwhile, which would end a global capture.
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            work()
        return graph


def _index_of(device: str) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError("device", f"{device!r} is neither cuda nor cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError("device", f"{device}: this machine, or this build of torch, has no CUDA")
    index = int(number) if number else torch.cuda.current_device()
    if index >= (count := torch.cuda.device_count()):
        raise ConfigError("device", f"{device}: this machine has {count} CUDA devices")
    capability = torch.cuda.get_device_capability(index)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            "device", f"{device} has compute capability {capability}; needed: {_LEAST_CAPABILITY}"
        )
    return index
