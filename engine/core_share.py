"""Who gets how many cores, when several engines of one process compute at the same time.

Each engine has its own thread, and torch splits each operation over a team of cores that waits for
its slowest member. Two teams on the same cores wait for each other at every operation, which costs
more than the second core gains: so those who compute at the same time divide the cores, and who
computes alone has all of them.

    prefill   |##############2##############|######1######|####1####|      |
    decode                          |#1#|#1#|#1#|#1#|#1#|#1#|#2#|#2#|#2#|#2#|
                                     ^ joins: prefill's next step uses one core
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

# Between two steps an engine schedules and sends; that long it still counts as computing.
_LINGER_S = 0.05


class Cores(Protocol):
    """How many cores a step may use."""

    def step(self) -> AbstractContextManager[int]:
        """Compute with so many, for the length of the block."""


class FixedCores:
    """Always the same number, however many others compute."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores

    @contextmanager
    def step(self) -> Iterator[int]:
        _use_cores(self._num_cores)
        yield self._num_cores


class CoreShare:
    """Divides the cores of one process. All runners that may overlap must be given the same one.

    `num_cores` is what torch would use by itself: the machine's cores, or `OMP_NUM_THREADS`.
    """

    def __init__(
        self, num_cores: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_cores = torch.get_num_threads() if num_cores is None else num_cores
        self._clock = clock
        self._lock = threading.Lock()
        self._busy_until: dict[int, float] = {}  # of each thread; infinity during a step

    @contextmanager
    def step(self) -> Iterator[int]:
        """Compute with this thread's share, which is handed out for the length of the block."""
        thread = threading.get_ident()
        share = self._enter(thread)
        try:
            _use_cores(share)
            yield share
        finally:
            with self._lock:
                self._busy_until[thread] = self._clock() + _LINGER_S

    def _enter(self, thread: int) -> int:
        now = self._clock()
        with self._lock:
            self._busy_until = {key: end for key, end in self._busy_until.items() if end > now}
            self._busy_until[thread] = float("inf")
            return max(1, self._num_cores // len(self._busy_until))


def _use_cores(count: int) -> None:
    # The number belongs to the calling thread, but a thread's first parallel operation would
    # replace it by the one that any thread set last, unless it has been asked for before.
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
