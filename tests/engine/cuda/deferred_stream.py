"""A stand-in for a device: a thread that does what is submitted, later, in order.

What the host reads too early is not there yet, and what it overwrites too early is wrong: as on a
GPU, but on purpose. `hold` makes the device stand still, so that the host gets far ahead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.cuda.stream import Event, Graph

TIMEOUT_S = 20.0


class _Event:
    def __init__(self, stream: DeferredStream) -> None:
        self._stream = stream
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self._stream.num_waits += not self.reached.is_set()
        assert self.reached.wait(TIMEOUT_S), "the device does not get there"
        self._stream.check()


class _Graph:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._work()


class DeferredStream:
    """See `engine.cuda.stream.Stream`."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._runs = threading.Event()
        self._runs.set()
        self.num_waits = 0  # by the host, for something that was not there
        self.graphs: list[_Graph] = []
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            self._runs.wait()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the host raises it
                self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def submit(self, work: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:
            work()
        else:
            self._works.put(work)

    def record(self) -> Event:
        event = _Event(self)
        self.submit(event.reached.set)
        return event

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)

    def fetch(self, tensor: Tensor) -> Tensor:
        assert threading.current_thread() is self._thread
        return tensor.clone()

    def capture(self, work: Callable[[], None]) -> Graph:
        self.submit(work)
        self.record().synchronize()
        self.graphs.append(_Graph(work))
        return self.graphs[-1]

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The device does nothing within this block, and has done all that came before."""
        self.record().synchronize()
        self._runs.clear()
        try:
            yield
        finally:
            self._runs.set()

    def close(self) -> None:
        self._runs.set()
        self._works.put(None)
        self._thread.join(TIMEOUT_S)
