"""A transport that takes its time, and tells when a hand-off gets to which point.

It wraps a real one. What is delayed stays in order, as the transport's contract asks.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kv_transfer import (
    BlockPoolMemory,
    Extents,
    PeerLost,
    PeerPool,
    PeerUnreachable,
    Received,
    Transport,
    Write,
    WriteState,
)
from kv_transfer.wire import decode
from protocol import HandoffTicket

POINTS = ("PrefillStarted", "Destination", "Write", "Written", "Commit")

Delay = Callable[[str], float]  # point → seconds
OnPoint = Callable[[str, HandoffTicket], None]


class _SlowWrite:
    """PENDING until the real write has been started and has ended."""

    def __init__(self) -> None:
        self.inner: Write | None = None

    @property
    def state(self) -> WriteState:
        return WriteState.PENDING if self.inner is None else self.inner.state


class SlowTransport:
    def __init__(self, inner: Transport, delay: Delay, on_point: OnPoint = lambda *_: None) -> None:
        self._inner = inner
        self._delay = delay
        self._on_point = on_point
        self._late: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"copy-late-{inner.endpoint}")

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        self._on_activity = on_activity
        self._inner.register(pool, on_activity)

    def resolve(self, endpoint: str) -> str:
        return self._inner.resolve(endpoint)

    def connect(self, peer: str) -> None:
        self._inner.connect(peer)

    def peer_pool(self, peer: str) -> PeerPool | None:
        return self._inner.peer_pool(peer)

    def open(self, ticket: HandoffTicket, peer: str, block_ids: Sequence[int]) -> None:
        self._inner.open(ticket, peer, block_ids)

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> Write:
        self._on_point("Write", ticket)
        write = _SlowWrite()

        def start() -> None:
            write.inner = self._inner.write(peer, ticket, extents)
            self._on_point("Written", ticket)

        self._later("Write", start)
        return write

    def notify(self, peer: str, message: bytes) -> None:
        decoded = decode(message)
        point = type(decoded).__name__
        self._on_point(point, decoded.ticket)

        def send() -> None:
            with contextlib.suppress(PeerUnreachable):  # the cluster is stopping
                self._inner.notify(peer, message)

        self._later(point, send)

    def receive(self) -> Sequence[Received]:
        return self._inner.receive()

    def lost_peers(self) -> Sequence[PeerLost]:
        return self._inner.lost_peers()

    def fence(self, ticket: HandoffTicket) -> bool:
        return self._inner.fence(ticket)

    def close(self) -> None:
        if self._thread.is_alive():
            self._late.put(None)
            self._thread.join()
        self._inner.close()

    def _later(self, point: str, action: Callable[[], None]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._late.put((time.monotonic() + self._delay(point), action))

    def _work(self) -> None:
        while (item := self._late.get()) is not None:
            due, action = item
            time.sleep(max(0.0, due - time.monotonic()))
            action()
