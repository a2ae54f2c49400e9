"""Between pools of one process: a copy thread for each node, and a hub where they meet.

The target refuses any write whose ticket it has not opened or whose block is not part of that
ticket, so a fence is exact: once a ticket is closed and its running write has ended, no byte of it
can land.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kv_transfer.extents import Extents
from kv_transfer.layout import BlockLayout, BlockPoolMemory, PeerPool
from kv_transfer.transport import (
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    Received,
    WriteState,
)
from kv_transfer.transports.copy_thread import CopyExtents, CopyThread, CopyWrite, copy_extents
from kv_transfer.wire import MAX_MESSAGE_BYTES
from protocol import HandoffTicket

DrainedT = TypeVar("DrainedT")

MAX_INBOX = 65536  # messages; a node that takes none of them for so long is lost
_JOIN_TIMEOUT_S = 10.0


class MemoryHub:
    """The endpoints of one process."""

    def __init__(self) -> None:
        self._transports: dict[str, MemoryTransport] = {}
        self._num_named: Counter[str] = Counter()
        self._lock = threading.Lock()

    def new_endpoint(self, name: str) -> str:
        """One that nobody has had before."""
        with self._lock:
            self._num_named[name] += 1
            number = self._num_named[name]
        return f"memory:{name}" if number == 1 else f"memory:{name}.{number}"

    def add(self, transport: MemoryTransport) -> None:
        with self._lock:
            assert transport.endpoint not in self._transports
            self._transports[transport.endpoint] = transport

    def remove(self, transport: MemoryTransport) -> None:
        """All others are told that it is gone."""
        with self._lock:
            removed = self._transports.pop(transport.endpoint, None)
            others = list(self._transports.values())
        if removed is not None:
            for other in others:
                other._lose(removed.endpoint, PeerUnreachable(f"{removed.endpoint} is gone"))

    def find(self, endpoint: str) -> MemoryTransport:
        with self._lock:
            transport = self._transports.get(endpoint)
        if transport is None:
            raise PeerUnreachable(f"there is no node at {endpoint}")
        return transport


class _Opened(NamedTuple):
    """What a ticket allows."""

    peer: str
    block_ids: frozenset[int]

    def allows(self, peer: str, extents: Extents, layout: BlockLayout) -> bool:
        return (
            peer == self.peer
            and not extents.cross_blocks(layout.bytes_per_block)
            and self.block_ids.issuperset(extents.their_blocks(layout.bytes_per_block))
        )


class MemoryTransport:
    """One node's end. Writes run on one thread, in order.

    `copy` is for who knows a better way to copy, or a slower one.
    """

    def __init__(self, hub: MemoryHub, name: str, *, copy: CopyExtents = copy_extents) -> None:
        self._copier = CopyThread(name, self._copy, lambda: self._on_activity())
        self._copy_extents = copy
        self.endpoint = hub.new_endpoint(name)
        self._hub = hub
        self._inbox: deque[Received] = deque()
        self._lost: deque[PeerLost] = deque()
        self._open: dict[HandoffTicket, _Opened] = {}
        self._writing: dict[HandoffTicket, int] = {}
        self._lock = threading.Lock()
        self._idle = threading.Event()  # nobody writes to our pool
        self._idle.set()

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        self.pool = pool
        self._on_activity = on_activity
        self._hub.add(self)

    def resolve(self, endpoint: str) -> str:
        if not endpoint.startswith("memory:"):
            raise PeerUnreachable(f"{endpoint} is not in this process")
        return endpoint

    def connect(self, peer: str) -> None:
        """There is nothing between us, if only it is there."""
        try:
            self._hub.find(peer)
        except PeerUnreachable as error:
            self._lose(peer, error)

    def peer_pool(self, peer: str) -> PeerPool:
        """As Transport. Pools of one process move KV where they are on one device."""
        pool = self._hub.find(peer).pool
        if pool.device != self.pool.device:
            raise PeerRefused(f"{peer} has its pool on {pool.device}, not {self.pool.device}")
        return pool.shape

    def open(self, ticket: HandoffTicket, peer: str, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._open[ticket] = _Opened(peer, frozenset(block_ids))

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> CopyWrite:
        write = CopyWrite(peer, ticket, extents)
        self._copier.put(write)
        return write

    def notify(self, peer: str, message: bytes) -> None:
        if len(message) > MAX_MESSAGE_BYTES:
            raise PeerUnreachable(
                f"a message of {len(message)} bytes for {peer}; "
                f"at most {MAX_MESSAGE_BYTES} may be sent"
            )
        self._hub.find(self.endpoint)  # else this node has closed
        self._hub.find(peer)._deliver(Received(self.endpoint, message))

    def receive(self) -> Sequence[Received]:
        return _drain(self._inbox)

    def lost_peers(self) -> Sequence[PeerLost]:
        return _drain(self._lost)

    def fence(self, ticket: HandoffTicket) -> bool:
        with self._lock:
            self._open.pop(ticket, None)
            return ticket not in self._writing

    def close(self) -> None:
        self._hub.remove(self)
        with self._lock:
            self._open.clear()
        self._copier.close()
        self._idle.wait(_JOIN_TIMEOUT_S)  # a peer may be in the middle of a block

    def _deliver(self, received: Received) -> None:
        if len(self._inbox) >= MAX_INBOX:
            raise PeerUnreachable(f"{self.endpoint} has {MAX_INBOX} messages unread")
        self._inbox.append(received)
        self._on_activity()

    def _lose(self, peer: str, error: PeerUnreachable) -> None:
        self._lost.append(PeerLost(peer, error))
        self._on_activity()

    def _copy(self, write: CopyWrite) -> WriteState:
        try:
            target = self._hub.find(write.peer)
        except PeerUnreachable:
            return WriteState.FAILED
        if not write.extents.within(self.pool.num_bytes, target.pool.num_bytes):
            return WriteState.FAILED
        if not target._begin_write(self.endpoint, write):
            return WriteState.FAILED
        try:
            self._copy_bytes(write.extents, self.pool.address, target.pool.address)
        finally:
            target._end_write(write)
        return WriteState.DONE

    @property
    def _copy_bytes(self) -> CopyExtents:
        copier = self.pool.copier
        return self._copy_extents if copier is None else copier.copy

    def _begin_write(self, writer: str, write: CopyWrite) -> bool:
        """As the target: whether this write is allowed. If so, fences wait for its end."""
        with self._lock:
            opened = self._open.get(write.ticket)
            if opened is None or not opened.allows(writer, write.extents, self.pool.layout):
                return False
            self._writing[write.ticket] = self._writing.get(write.ticket, 0) + 1
            self._idle.clear()
            return True

    def _end_write(self, write: CopyWrite) -> None:
        with self._lock:
            self._writing[write.ticket] -= 1
            if not self._writing[write.ticket]:
                del self._writing[write.ticket]
            if not self._writing:
                self._idle.set()
            fenced = write.ticket not in self._open
        if fenced:
            self._on_activity()  # somebody here waits for this end


def _drain(queue: deque[DrainedT]) -> list[DrainedT]:
    """What is in it now; others may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
