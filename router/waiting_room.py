"""Where requests wait that no node can take at the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class _Guest:
    seen: Hashable  # the state of the nodes that it could not use
    news: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingRoom:
    """Wakes whoever waits when the nodes are not any more as it has seen them."""

    def __init__(self) -> None:
        self._guests: dict[str, _Guest] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._guests)

    async def wait(self, request_id: str, seen: Hashable, until: float) -> bool:
        """Whether there is something new before `until`, of the event loop's clock."""
        assert request_id not in self._guests, f"{request_id} is used twice"
        if self._closed:
            return False
        guest = self._guests[request_id] = _Guest(seen)
        try:
            async with asyncio.timeout_at(until):
                await guest.news.wait()
        except TimeoutError:
            return False
        finally:
            del self._guests[request_id]
        return not self._closed

    def tell(self, state: Hashable) -> None:
        """How the nodes are now."""
        for guest in self._guests.values():
            if guest.seen != state:
                guest.news.set()

    def wake(self, request_id: str) -> None:
        """It has ended. Harmless if it is not here."""
        if request_id in self._guests:
            self._guests[request_id].news.set()

    def close(self) -> None:
        """Nothing will change any more."""
        self._closed = True
        for guest in self._guests.values():
            guest.news.set()
