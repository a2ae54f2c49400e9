"""Several transports of one node: for each peer the first that leads there.

endpoint   shm:…+nixl:…      one part for each transport, the fastest first
a peer on this host          shm: we have it, it has it, and its part says that it is near
a peer elsewhere             nixl
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain

from kv_transfer.extents import Extents
from kv_transfer.layout import BlockPoolMemory, PeerPool
from kv_transfer.transport import PeerLost, PeerUnreachable, Received, Transport, Write
from protocol import HandoffTicket

_SEPARATOR = "+"


class AutoTransport:
    """Chooses among its children, which are of different schemes."""

    def __init__(self, children: Sequence[Transport]) -> None:
        self.endpoint = _SEPARATOR.join(child.endpoint for child in children)
        self._children = tuple(children)
        self._by_scheme = {_scheme_of(child.endpoint): child for child in children}
        self._opened: dict[HandoffTicket, Transport] = {}
        assert len(self._by_scheme) == len(children)

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        for child in self._children:
            child.register(pool, on_activity)

    def resolve(self, endpoint: str) -> str:
        """The part of the endpoint that is used, of what both ends have and what leads there."""
        parts = {_scheme_of(part): part for part in endpoint.split(_SEPARATOR)}
        reasons = []
        for scheme, child in self._by_scheme.items():
            if scheme in parts:
                try:
                    return child.resolve(parts[scheme])
                except PeerUnreachable as error:
                    reasons.append(str(error))
        ours = ", ".join(self._by_scheme)
        raise PeerUnreachable("; ".join(reasons) or f"{endpoint} offers none of {ours}")

    def connect(self, peer: str) -> None:
        self._to(peer).connect(peer)

    def peer_pool(self, peer: str) -> PeerPool | None:
        return self._to(peer).peer_pool(peer)

    def open(self, ticket: HandoffTicket, peer: str, block_ids: Sequence[int]) -> None:
        child = self._opened[ticket] = self._to(peer)
        child.open(ticket, peer, block_ids)

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> Write:
        return self._to(peer).write(peer, ticket, extents)

    def notify(self, peer: str, message: bytes) -> None:
        self._to(peer).notify(peer, message)

    def receive(self) -> Sequence[Received]:
        return list(chain.from_iterable(child.receive() for child in self._children))

    def lost_peers(self) -> Sequence[PeerLost]:
        return list(chain.from_iterable(child.lost_peers() for child in self._children))

    def fence(self, ticket: HandoffTicket) -> bool:
        child = self._opened.get(ticket)
        if child is None:
            return True
        proven = child.fence(ticket)
        if proven:
            del self._opened[ticket]
        return proven

    def close(self) -> None:
        """Of all children, also if one raises."""
        with ExitStack() as stack:
            for child in self._children:
                stack.callback(child.close)

    def _to(self, peer: str) -> Transport:
        return self._by_scheme[_scheme_of(peer)]


def _scheme_of(endpoint: str) -> str:
    return endpoint.partition(":")[0]
