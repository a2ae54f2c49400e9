"""Tells when it is time, or when a gate has opened."""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import threading
import time
from collections.abc import Callable

_JOIN_TIMEOUT_S = 10.0


class Hold:
    """Something is held back until `due` (monotonic), or until a gate opens; `over` is for good."""

    def __init__(self, due: float | None) -> None:
        self._due = due
        self._released = False

    @property
    def over(self) -> bool:
        if not self._released and self._due is not None:
            self._released = time.monotonic() >= self._due
        return self._released

    def release(self) -> None:
        self._released = True


class Alarm:
    """Calls `ring` from a thread of its own whenever a hold that it made is over.

    There is no thread before the first hold, and it sleeps while nothing is due. What is held when
    this is closed is so for ever.
    """

    def __init__(self, name: str, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._dues: list[float] = []  # a heap
        self._gates: dict[int, Hold] = {}  # by the descriptor of the FIFO
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"copy-late-{name}", daemon=True)
        self._waker = -1

    def hold(self, seconds: float | None, gate: str | None = None) -> Hold:
        """For so long, or until the gate opens; with neither, for ever."""
        due = None if seconds is None else time.monotonic() + seconds
        hold = Hold(due)
        fd = None if gate is None else _open_gate(gate)
        if gate is not None and fd is None:
            hold.release()
        if fd is not None or due is not None:
            self._await(hold, due, fd)
        return hold

    def hold_until(self, due: float) -> Hold:
        hold = Hold(due)
        self._await(hold, due, None)
        return hold

    def close(self) -> None:
        """Nobody is called any more."""
        with self._lock:
            if self._closing or self._thread.ident is None:
                self._closing = True
                return
            self._closing = True
            os.eventfd_write(self._waker, 1)
        self._thread.join(_JOIN_TIMEOUT_S)
        assert not self._thread.is_alive(), "an alarm that does not end"
        for fd in (*self._gates, self._waker):
            os.close(fd)
        self._gates.clear()

    def _await(self, hold: Hold, due: float | None, gate: int | None) -> None:
        with self._lock:
            if self._closing:
                if gate is not None:
                    os.close(gate)
                return
            if due is not None:
                heapq.heappush(self._dues, due)
            if gate is not None:
                self._gates[gate] = hold
            if self._thread.ident is None:
                self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread.start()
            else:
                os.eventfd_write(self._waker, 1)

    def _run(self) -> None:
        while not self._closing:
            opened = self._wait()
            due = self._take_due()
            if opened or due:
                self._ring()

    def _wait(self) -> bool:
        """Until something may be due; whether a gate has opened."""
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        with self._lock:
            for gate in self._gates:
                poll.register(gate, 0)  # the hang-up of its last writer is told anyway
            wait_s = self._dues[0] - time.monotonic() if self._dues else None
        # Rounded up, as a time that has not come yet rings nobody.
        events = poll.poll(None if wait_s is None else max(0, int(wait_s * 1000) + 1))
        opened = [fd for fd, _ in events if fd != self._waker]
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)
        with self._lock:
            for fd in opened:
                self._gates.pop(fd).release()
                os.close(fd)
        return bool(opened)

    def _take_due(self) -> bool:
        now, found = time.monotonic(), False
        with self._lock:
            while self._dues and self._dues[0] <= now:
                heapq.heappop(self._dues)
                found = True
        return found


def _open_gate(path: str) -> int | None:
    """None: it is open."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
