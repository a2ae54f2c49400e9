"""Between pools of one process: a copy thread for each node, and a hub where they meet.

The target refuses any write whose ticket it has not opened or whose block is not part of that
ticket, so a fence is exact: once a ticket is closed and its running write has ended, no byte of it
can land.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from kv_transfer.layout import BlockLayout, BlockPoolMemory
from kv_transfer.transport import PeerUnreachable, WriteState
from protocol import HandoffTicket

MAX_INBOX = 65536  # messages; a node that takes none of them for so long is lost
_JOIN_TIMEOUT_S = 10.0


class MemoryHub:
    """The endpoints of one process."""

    def __init__(self) -> None:
        self._transports: dict[str, MemoryTransport] = {}
        self._lock = threading.Lock()

    def add(self, transport: MemoryTransport) -> None:
        with self._lock:
            assert transport.endpoint not in self._transports
            self._transports[transport.endpoint] = transport

    def remove(self, transport: MemoryTransport) -> None:
        with self._lock:
            self._transports.pop(transport.endpoint, None)

    def find(self, endpoint: str) -> MemoryTransport:
        with self._lock:
            transport = self._transports.get(endpoint)
        if transport is None:
            raise PeerUnreachable(f"there is no node at {endpoint}")
        return transport


class MemoryWrite:
    """Blocks that the copy thread copies or has copied."""

    def __init__(self, peer: str, ticket: HandoffTicket, blocks: Sequence[tuple[int, int]]) -> None:
        self.peer = peer
        self.ticket = ticket
        self.blocks = blocks
        self.state = WriteState.PENDING
        self.checksums: Sequence[int] = ()


class MemoryTransport:
    """One node's end. Writes run on one thread, in order, outside the interpreter lock."""

    def __init__(self, hub: MemoryHub, name: str, *, checksums: bool = True) -> None:
        self.endpoint = f"memory:{name}"
        self._hub = hub
        self._with_checksums = checksums
        self._inbox: deque[bytes] = deque()
        self._open: dict[HandoffTicket, frozenset[int]] = {}
        self._writing: dict[HandoffTicket, int] = {}
        self._lock = threading.Lock()
        self._idle = threading.Event()  # nobody writes to our pool
        self._idle.set()
        # At most one write of each hand-off is under way, so this is as bounded as those are.
        self._pending: queue.SimpleQueue[MemoryWrite | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=self._copy_all, name=f"copy-{name}", daemon=True)

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        self.pool = pool
        self._on_activity = on_activity
        self._hub.add(self)

    def peer_layout(self, peer: str) -> BlockLayout:
        return self._hub.find(peer).pool.layout

    def open(self, ticket: HandoffTicket, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._open[ticket] = frozenset(block_ids)

    def write(
        self, peer: str, ticket: HandoffTicket, blocks: Sequence[tuple[int, int]]
    ) -> MemoryWrite:
        if self._copier.ident is None:  # a node that only receives needs no copier
            self._copier.start()
        write = MemoryWrite(peer, ticket, blocks)
        self._pending.put(write)
        return write

    def notify(self, peer: str, message: bytes) -> None:
        self._hub.find(peer)._deliver(message)

    def receive(self) -> Sequence[bytes]:
        received = []
        while self._inbox:
            received.append(self._inbox.popleft())
        return received

    def fence(self, ticket: HandoffTicket) -> bool:
        with self._lock:
            self._open.pop(ticket, None)
            return ticket not in self._writing

    def close(self) -> None:
        self._hub.remove(self)
        with self._lock:
            self._open.clear()
        if self._copier.is_alive():
            self._pending.put(None)
            self._copier.join(_JOIN_TIMEOUT_S)
        self._idle.wait(_JOIN_TIMEOUT_S)  # a peer may be in the middle of a block

    def _deliver(self, message: bytes) -> None:
        if len(self._inbox) >= MAX_INBOX:
            raise PeerUnreachable(f"{self.endpoint} has {MAX_INBOX} messages unread")
        self._inbox.append(message)
        self._on_activity()

    def _copy_all(self) -> None:
        while (write := self._pending.get()) is not None:
            write.state = self._copy(write)
            self._on_activity()

    def _copy(self, write: MemoryWrite) -> WriteState:
        try:
            target = self._hub.find(write.peer)
        except PeerUnreachable:
            return WriteState.FAILED
        if not target._begin_write(write):
            return WriteState.FAILED
        try:
            write.checksums = self._copy_blocks(write, target.pool)
        finally:
            target._end_write(write)
        return WriteState.DONE

    def _copy_blocks(self, write: MemoryWrite, target: BlockPoolMemory) -> Sequence[int]:
        size = self.pool.layout.bytes_per_block
        checksums = []
        for ours, theirs in write.blocks:
            ctypes.memmove(target.address_of(theirs), self.pool.address_of(ours), size)
            if self._with_checksums:
                checksums.append(xxhash.xxh3_64_intdigest(self.pool.view(ours)))
        return checksums

    def _begin_write(self, write: MemoryWrite) -> bool:
        """As the target: whether this write is allowed. If so, fences wait for its end."""
        with self._lock:
            allowed = self._open.get(write.ticket, frozenset())
            if not allowed.issuperset(theirs for _, theirs in write.blocks):
                return False
            self._writing[write.ticket] = self._writing.get(write.ticket, 0) + 1
            self._idle.clear()
            return True

    def _end_write(self, write: MemoryWrite) -> None:
        with self._lock:
            self._writing[write.ticket] -= 1
            if not self._writing[write.ticket]:
                del self._writing[write.ticket]
            if not self._writing:
                self._idle.set()
            fenced = write.ticket not in self._open
        if fenced:
            self._on_activity()  # somebody here waits for this end
