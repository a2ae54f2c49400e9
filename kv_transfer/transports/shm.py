"""Between processes of one host: P maps D's pool, and writes into it.

    D's pool lies in a memfd ── over a Unix socket, with the handshake ──► P maps it
    P: one copy, from its pool into that memory
    messages: over the same sockets

D cannot keep P from writing. So what proves the end of all writes is P's own word, which is not
the transport's business, or that P's process has ended, which the kernel tells.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kv_transfer.extents import Extents
from kv_transfer.layout import BlockPoolMemory, PeerPool
from kv_transfer.peering import ClusterToken, Passport, PeeringConfig, PeerNetwork, UnixMedium
from kv_transfer.shared_memory import SharedMemory
from kv_transfer.transport import PeerLost, PeerRefused, PeerUnreachable, Received, WriteState
from kv_transfer.transports.copy_thread import CopyExtents, CopyThread, CopyWrite, copy_extents
from protocol import HandoffTicket

SCHEME = "shm"
MAX_TICKETS = 1 << 16  # that are remembered; those asked about last are the last to go
_DEFAULTS = PeeringConfig()


class ShmTransport:
    """One node's end. `copy` is for who knows a better way to copy, or a slower one."""

    def __init__(
        self,
        name: str,
        token: ClusterToken,
        config: PeeringConfig = _DEFAULTS,
        *,
        copy: CopyExtents = copy_extents,
    ) -> None:
        self._network = PeerNetwork(name, UnixMedium(SCHEME), token, config)
        self._copier = CopyThread(name, self._copy, lambda: self._on_activity())
        self._copy_extents = copy
        self._lock = threading.Lock()
        self._targets: dict[str, SharedMemory | PeerRefused] = {}
        self._tickets: OrderedDict[HandoffTicket, str] = OrderedDict()  # the peer that may write
        self._has_forgotten = False  # a ticket

    @property
    def endpoint(self) -> str:
        return self._network.endpoint

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        """The pool must begin with the memory behind its descriptor."""
        assert pool.fd is not None, "the pool is not in shared memory"
        self._pool = pool
        self._on_activity = on_activity
        self._network.start(pool.shape, on_activity, descriptors=[pool.fd])

    # ------------------------------------------------------------------ peers

    def resolve(self, endpoint: str) -> str:
        self._network.check(endpoint)
        return endpoint

    def connect(self, peer: str) -> None:
        self._network.connect(peer)

    def peer_pool(self, peer: str) -> PeerPool | None:
        passport = self._network.passport(peer)
        if passport is None:
            return None
        self._target(passport)
        return passport.pool

    def lost_peers(self) -> Sequence[PeerLost]:
        lost = self._network.lost_peers()
        with self._lock:
            for peer, _ in lost:  # a copy under way keeps the memory until it ends
                self._targets.pop(peer, None)
        return lost

    def _target(self, passport: Passport) -> SharedMemory:
        """Raises PeerRefused if the peer's memory is not as it should be."""
        peer = passport.endpoint
        with self._lock:
            if peer not in self._targets:
                self._targets[peer] = _map(self._network.take_descriptors(peer), passport)
            target = self._targets[peer]
        if isinstance(target, PeerRefused):
            raise PeerRefused(*target.args)
        return target

    # ------------------------------------------------------------------ messages

    def notify(self, peer: str, message: bytes) -> None:
        self._network.send(peer, message)

    def receive(self) -> Sequence[Received]:
        return self._network.receive()

    # ------------------------------------------------------------------ writes

    def open(self, ticket: HandoffTicket, peer: str, block_ids: Sequence[int]) -> None:
        self._tickets[ticket] = peer
        self._tickets.move_to_end(ticket)
        if len(self._tickets) > MAX_TICKETS:
            self._tickets.popitem(last=False)
            self._has_forgotten = True

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> CopyWrite:
        write = CopyWrite(peer, ticket, extents)
        self._copier.put(write)
        return write

    def fence(self, ticket: HandoffTicket) -> bool:
        """True: it was never opened, or the peer's process has ended, or it never met us."""
        peer = self._tickets.get(ticket)
        if peer is None:
            return not self._has_forgotten
        self._tickets.move_to_end(ticket)
        return self._network.has_exited(peer) or self._network.is_stranger(peer)

    def _copy(self, write: CopyWrite) -> WriteState:
        try:
            passport = self._network.passport(write.peer)
            if passport is None:
                return WriteState.FAILED
            target = self._target(passport)
            if not write.extents.within(self._pool.num_bytes, target.num_bytes):
                return WriteState.FAILED
            self._copy_extents(write.extents, self._pool.address, target.address)
            self._network.passport(write.peer)  # who is lost meanwhile has not got it
        except PeerUnreachable:
            return WriteState.FAILED
        return WriteState.DONE

    def close(self) -> None:
        self._copier.close()
        self._network.close()
        self._targets.clear()


def _map(descriptors: Sequence[int], passport: Passport) -> SharedMemory | PeerRefused:
    if len(descriptors) != 1:
        for fd in descriptors:
            os.close(fd)
        return PeerRefused(f"{passport.endpoint} sent {len(descriptors)} memories instead of one")
    try:
        return SharedMemory.attach(descriptors[0], passport.pool.num_bytes)
    except PeerRefused as error:
        return error
