"""One node's transport and pool, as the conformance suite drives them, wherever they are."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from kv_transfer import (
    BlockLayout,
    Extents,
    PeerLost,
    PeerPool,
    PeerUnreachable,
    Received,
    Transport,
    Write,
    WriteState,
)
from protocol import HandoffTicket
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, GatedPool, make_random_pool

Rows = list[tuple[int, int, int]]  # offset in our pool, offset in the peer's, bytes


class EndSpec(msgspec.Struct, frozen=True):
    """What to make. The pool holds `fill` in every byte, or else what `seed` gives."""

    name: str
    fill: int | None = None
    seed: int = 0
    num_blocks: int = 33
    layout: BlockLayout = LAYOUT

    def make_contents(self, pool: GatedPool) -> None:
        if self.fill is None:
            source = make_random_pool(self.seed, self.num_blocks, self.layout)
            pool.bytes[:] = source.bytes
        else:
            pool.bytes[:] = self.fill


class Parts(NamedTuple):
    """What a factory of ends gives. `pool.copy_extents` should be how this transport copies, or

    whatever else makes that a write stops at the gates of our blocks.
    """

    transport: Transport
    pool: GatedPool


MakeParts = Callable[[EndSpec], Parts]


class Usage(msgspec.Struct, frozen=True):
    """Of the process in which an end lives."""

    threads: list[str]
    descriptors: list[str]  # what they lead to


class End(Protocol):
    """Whatever waits, waits for `on_activity` before it looks again, and fails after a while."""

    def endpoint(self) -> str: ...
    def shape(self) -> PeerPool: ...
    def resolve(self, endpoint: str) -> str: ...
    def connect(self, peer: str) -> None: ...
    def peer_pool(self, peer: str) -> PeerPool | None: ...
    def connected(self, peer: str) -> PeerPool:
        """Connect, and wait for it. Raises PeerUnreachable."""

    def open(self, ticket: HandoffTicket, peer: str, block_ids: list[int]) -> None: ...
    def write(self, peer: str, ticket: HandoffTicket, rows: Rows) -> int:
        """The number of the write."""

    def state(self, write: int) -> str:
        """The name of its WriteState."""

    def ended(self, write: int) -> str:
        """Wait until it is not PENDING."""

    def fence(self, ticket: HandoffTicket) -> bool: ...
    def fenced(self, ticket: HandoffTicket) -> None:
        """Wait until `fence` says True."""

    def notify(self, peer: str, message: bytes) -> None: ...
    def notify_all(self, peer: str, messages: list[bytes]) -> None: ...
    def receive(self) -> list[Received]: ...
    def received(self, count: int) -> list[Received]:
        """Wait for at least so many."""

    def lost(self) -> tuple[str, str]:
        """Wait until a peer is lost; its endpoint, and why."""

    def read(self) -> bytes:
        """The whole pool."""

    def fill(self, value: int) -> None: ...
    def hold(self, block_id: int) -> None:
        """From now on a write stops before it copies this block of ours."""

    def held(self, block_id: int) -> None:
        """Wait until one has stopped there."""

    def release(self, block_id: int) -> None: ...
    def begin_close(self) -> None:
        """Close, on another thread."""

    def closed(self, within_s: float) -> bool:
        """Whether that has returned, at most so much later."""

    def close(self) -> None: ...
    def cpu_s(self) -> float:
        """That its process has used."""


class LocalEnd:
    """In this process."""

    def __init__(self, make_parts: MakeParts, spec: EndSpec) -> None:
        self._transport, self._pool = make_parts(spec)
        spec.make_contents(self._pool)
        self._writes: list[Write] = []
        self._activity = threading.Event()
        self._closing: threading.Thread | None = None
        self._transport.register(self._pool, self._activity.set)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Look only when told that it is worth while, as a node does."""
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            self._activity.clear()
            if condition():
                return
            left = give_up - time.monotonic()
            assert self._activity.wait(max(0.0, left)), "nothing happened, or nobody told"

    def endpoint(self) -> str:
        return self._transport.endpoint

    def shape(self) -> PeerPool:
        return self._pool.shape

    def resolve(self, endpoint: str) -> str:
        return self._transport.resolve(endpoint)

    def connect(self, peer: str) -> None:
        self._transport.connect(peer)

    def peer_pool(self, peer: str) -> PeerPool | None:
        return self._transport.peer_pool(peer)

    def connected(self, peer: str) -> PeerPool:
        self._transport.connect(peer)
        self._until(lambda: self._transport.peer_pool(peer) is not None)
        pool = self._transport.peer_pool(peer)
        assert pool is not None
        return pool

    def open(self, ticket: HandoffTicket, peer: str, block_ids: list[int]) -> None:
        self._transport.open(ticket, peer, block_ids)

    def write(self, peer: str, ticket: HandoffTicket, rows: Rows) -> int:
        extents = Extents(np.array(rows, dtype=np.int64).reshape(-1, 3))
        self._writes.append(self._transport.write(peer, ticket, extents))
        return len(self._writes) - 1

    def state(self, write: int) -> str:
        return self._writes[write].state.name

    def ended(self, write: int) -> str:
        self._until(lambda: self._writes[write].state is not WriteState.PENDING)
        return self.state(write)

    def fence(self, ticket: HandoffTicket) -> bool:
        return self._transport.fence(ticket)

    def fenced(self, ticket: HandoffTicket) -> None:
        self._until(lambda: self._transport.fence(ticket))

    def notify(self, peer: str, message: bytes) -> None:
        self._transport.notify(peer, message)

    def notify_all(self, peer: str, messages: list[bytes]) -> None:
        for message in messages:
            self._transport.notify(peer, message)

    def receive(self) -> list[Received]:
        return list(self._transport.receive())

    def received(self, count: int) -> list[Received]:
        messages: list[Received] = []

        def enough() -> bool:
            messages.extend(self._transport.receive())
            return len(messages) >= count

        self._until(enough)
        return messages

    def lost(self) -> tuple[str, str]:
        found: list[PeerLost] = []

        def any_lost() -> bool:
            found.extend(self._transport.lost_peers())
            return bool(found)

        self._until(any_lost)
        assert len({loss.peer for loss in found}) == 1, found
        assert isinstance(found[0].error, PeerUnreachable)
        return found[0].peer, str(found[0].error)

    def read(self) -> bytes:
        return self._pool.bytes.tobytes()

    def fill(self, value: int) -> None:
        self._pool.bytes[:] = value

    def hold(self, block_id: int) -> None:
        self._pool.gate(block_id)

    def held(self, block_id: int) -> None:
        self._pool.gate(block_id).wait_until_reached()

    def release(self, block_id: int) -> None:
        self._pool.gate(block_id).open()

    def begin_close(self) -> None:
        self._closing = threading.Thread(target=self._transport.close, name="closing")
        self._closing.start()

    def closed(self, within_s: float) -> bool:
        assert self._closing is not None
        self._closing.join(within_s)
        return not self._closing.is_alive()

    def close(self) -> None:
        """A test that has failed may have left a write at a gate."""
        for gate in self._pool.gates.values():
            gate.open()
        self._transport.close()

    def cpu_s(self) -> float:
        return time.process_time()


def usage() -> Usage:
    """Of this process, now."""
    gc.collect()
    return Usage(
        threads=sorted(thread.name for thread in threading.enumerate()),
        descriptors=sorted(_descriptors()),
    )


def _descriptors() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one with which the directory was read
            continue
    return targets
