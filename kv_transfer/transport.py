"""How bytes and small messages get from one pool to another.

A transport belongs to one node. What it offers is narrow: it can write runs of bytes into the pool
of a peer, and send the peer a message. Nothing here waits: connections and writes are polled, and
`on_activity` is called (from any thread) when polling may be worth while.

    connect ─► peer_pool is known ─► notify, write … ─► lost_peers, if it goes away
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kv_transfer.extents import Extents
from kv_transfer.layout import BlockPoolMemory, PeerPool
from protocol import HandoffTicket, KvrelayError


class PeerUnreachable(KvrelayError):
    """There is nobody at this endpoint (any more)."""

    label = "peer_unreachable"


class PeerRefused(PeerUnreachable):
    """Somebody is there, but does not speak with us: wrong token, other version, no room."""

    label = "peer_refused"


class Received(NamedTuple):
    """A message, and the endpoint of the node that sent it."""

    peer: str
    data: bytes


class PeerLost(NamedTuple):
    """A peer that was connected, or that could not be."""

    peer: str
    error: PeerUnreachable


class WriteState(enum.Enum):
    """
    PENDING ──► DONE
       └──────► FAILED
    """

    PENDING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Write(Protocol):
    """Bytes on their way. While it is PENDING, its source may be read and its target written to.

    DONE and FAILED are final: nothing of it is read or lands from then on.
    """

    @property
    def state(self) -> WriteState: ...


class Transport(Protocol):
    """One node's end of all its transfers. Used from one thread, apart from `close`."""

    @property
    def endpoint(self) -> str:
        """Where peers reach this node: `scheme:` and an address. Never used again by another."""

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        """Blocks are read from and written to this pool from now on; peers may connect."""

    def resolve(self, endpoint: str) -> str:
        """The name by which this transport knows the peer in all other methods.

        Raises PeerUnreachable: nothing that this node speaks leads there.
        """

    def connect(self, peer: str) -> None:
        """Begin to; harmless when repeated."""

    def peer_pool(self, peer: str) -> PeerPool | None:
        """What the peer's pool looks like; None while that is not known yet.

        Raises PeerUnreachable, or PeerRefused: it could not be connected, or is lost.
        """

    def open(self, ticket: HandoffTicket, peer: str, block_ids: Sequence[int]) -> None:
        """This peer may write to these blocks of ours under this ticket."""

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> Write:
        """Start to copy. No extent crosses a block. Fails, rather than raises, without the peer."""

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message, as soon as the peer is connected. Messages to one peer stay in order.

        Raises PeerUnreachable, or PeerRefused: as `peer_pool`, or it takes no more messages.
        """

    def receive(self) -> Sequence[Received]:
        """The messages that have arrived since the last call."""

    def lost_peers(self) -> Sequence[PeerLost]:
        """The peers that were lost, or could not be connected, since the last call."""

    def fence(self, ticket: HandoffTicket) -> bool:
        """Close the ticket. True is proof that no write under it can land from now on.

        False: this transport cannot prove it yet, or by itself; ask again. The peer's own word,
        after all its writes have ended, is proof too, and is not the transport's business.
        """

    def close(self) -> None:
        """Withdraw from all peers; returns when nothing of ours reads or writes any more.

        Peers that still write into our pool keep its memory, not this node's.
        """
