"""Whether a node takes jobs, and who waits until it has none left."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

HANDOFF_GRACE_S = 2.0  # after a deadline, for KV that is on its way to a node that has room for it

Callback = Callable[[], object]


class DrainState(enum.Enum):
    TAKING = enum.auto()
    DRAINING = enum.auto()
    DRAINED = enum.auto()


class Drain:
    """Asked for from any thread, noticed by the engine's.

    TAKING ── begin ──► DRAINING ── note_empty ──► DRAINED
      ▲                    │                          │
      └───────────────── end ─────────────────────────┘
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = DrainState.TAKING
        self._deadline: float | None = None
        self._waiters: set[Callback] = set()

    @property
    def taking(self) -> bool:
        return self._state is DrainState.TAKING

    @property
    def drained(self) -> bool:
        """Whether it has got so far that nothing may come in any more, however late."""
        return self._state is DrainState.DRAINED

    def begin(self, deadline: float | None) -> None:
        """The earliest deadline counts."""
        with self._lock:
            if self.taking:
                self._state = DrainState.DRAINING
            known = [time for time in (self._deadline, deadline) if time is not None]
            self._deadline = min(known, default=None)

    def end(self) -> None:
        """Take jobs again."""
        with self._lock:
            self._state = DrainState.TAKING
            self._deadline = None
        self.release()

    def note_empty(self) -> None:
        """No job is left. Harmless while jobs are taken."""
        with self._lock:
            if self.taking:
                return
            self._state = DrainState.DRAINED
        self.release()

    def wait(self, callback: Callback) -> None:
        """Have this called at the end, once."""
        with self._lock:
            self._waiters.add(callback)

    def forget(self, callback: Callback) -> None:
        with self._lock:
            self._waiters.discard(callback)

    def release(self) -> None:
        """Nobody is kept waiting."""
        with self._lock:
            waiters, self._waiters = self._waiters, set()
        for callback in waiters:
            callback()

    def is_overdue(self, now: float, grace_s: float = 0.0) -> bool:
        deadline = self._deadline
        return deadline is not None and now >= deadline + grace_s

    def next_time(self, now: float) -> float | None:
        """When there is something to do about the deadline."""
        deadline = self._deadline
        if deadline is None:
            return None
        times = (deadline, deadline + HANDOFF_GRACE_S)
        return next((time for time in times if time > now), None)
