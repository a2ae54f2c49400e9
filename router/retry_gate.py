"""How many attempts after the first may be without a token at a time.

What a lost host had to do comes back all at once, and failures that overload causes cause more
load. So retries wait in line, and the next enters when one inside has its first token, or has
failed: those who do the work set the pace.

    enter ──► line ──► inside ── first token, failure, end: leave ──►
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.config import RouterConfig


class RetryGate:
    """Requests by id, first come first served. Belongs to one event loop."""

    def __init__(self, config: RouterConfig, num_inflight: Callable[[], int]) -> None:
        self._config = config
        self._num_inflight = num_inflight
        self._inside: set[str] = set()
        self._line: dict[str, asyncio.Event] = {}

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    async def enter(self, request_id: str) -> None:
        """Returns when the request is inside, or has left the line by `leave`."""
        assert request_id not in self._inside
        assert request_id not in self._line
        turn = self._line[request_id] = asyncio.Event()
        self._let_in()
        try:
            await turn.wait()
        finally:
            self._line.pop(request_id, None)  # also if we were cancelled

    def leave(self, request_id: str) -> None:
        """Harmless if it is not here."""
        self._inside.discard(request_id)
        turn = self._line.pop(request_id, None)
        if turn is not None:
            turn.set()
        self._let_in()

    def _let_in(self) -> None:
        limit = max(self._config.retry_burst, int(self._config.retry_share * self._num_inflight()))
        while self._line and len(self._inside) < limit:
            request_id, turn = next(iter(self._line.items()))
            del self._line[request_id]
            self._inside.add(request_id)
            turn.set()
