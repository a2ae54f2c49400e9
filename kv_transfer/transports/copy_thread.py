"""A thread that copies extents between two pools which this process can address."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kv_transfer.extents import Extents
from kv_transfer.transport import WriteState
from protocol import HandoffTicket

CopyExtents = Callable[[Extents, int, int], None]
"""Copies, from the pool at the first address into the one at the second."""

_LONG_BYTES = 4 << 20
_JOIN_TIMEOUT_S = 30.0


def _memmove_of(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function = library.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function


_copy_long = _memmove_of(ctypes.CDLL(None))
_copy_short = _memmove_of(ctypes.PyDLL(None))


def copy_extents(extents: Extents, our_address: int, their_address: int) -> None:
    """As fast as memory is.

    Long runs are copied outside the interpreter lock. To get the lock back costs up to a switch
    interval (5 ms) when another thread computes, in which megabytes can be copied. So short runs
    are copied inside it: that keeps others for less than 1 ms more than any other thread does,
    while 16 MiB in blocks of 32 KiB take 4 ms instead of seconds.
    """
    runs = extents.merged().rows + np.array([our_address, their_address, 0])
    is_long = runs[:, 2] >= _LONG_BYTES
    for copy, chosen in ((_copy_long, runs[is_long]), (_copy_short, runs[~is_long])):
        for source, target, num_bytes in chosen.tolist():
            copy(target, source, num_bytes)


@dataclass(eq=False)
class CopyWrite:
    """Bytes that the copy thread copies or has copied."""

    peer: str
    ticket: HandoffTicket
    extents: Extents
    state: WriteState = WriteState.PENDING


class CopyThread:
    """Carries out writes in order. A node that never writes has no thread.

    At most one write of each hand-off is under way, so the queue is as bounded as those are.
    """

    def __init__(
        self, name: str, copy: Callable[[CopyWrite], WriteState], on_activity: Callable[[], None]
    ) -> None:
        self._copy = copy
        self._on_activity = on_activity
        self._pending: queue.SimpleQueue[CopyWrite | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"copy-{name}", daemon=True)

    def put(self, write: CopyWrite) -> None:
        if self._closing.is_set():
            write.state = WriteState.FAILED
            return
        if self._thread.ident is None:
            self._thread.start()
        self._pending.put(write)

    def close(self) -> None:
        """Returns when the running write has ended. Those behind it fail."""
        self._closing.set()
        if self._thread.ident is not None:
            self._pending.put(None)
            self._thread.join(_JOIN_TIMEOUT_S)
            assert not self._thread.is_alive(), "a copy that does not end"

    def _run(self) -> None:
        while (write := self._pending.get()) is not None:
            closing = self._closing.is_set()
            write.state = WriteState.FAILED if closing else self._copy(write)
            self._on_activity()
