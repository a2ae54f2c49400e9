"""How bytes and small messages get from one pool to another.

A transport belongs to one node. What it offers is narrow: it can write whole blocks into the pool
of a peer, and send the peer a message. Nothing here waits: writes are polled, and `on_activity`
is called (from any thread) when polling may be worth while.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer.layout import BlockLayout, BlockPoolMemory
from protocol import HandoffTicket, KvrelayError


class PeerUnreachable(KvrelayError):
    """There is nobody at this endpoint (any more)."""

    label = "peer_unreachable"


class WriteState(enum.Enum):
    """
    PENDING ──► DONE
       └──────► FAILED
    """

    PENDING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Write(Protocol):
    """Blocks on their way. Until it is no longer PENDING, its source may be read."""

    @property
    def state(self) -> WriteState: ...

    @property
    def checksums(self) -> Sequence[int]:
        """One for each block, of what was read from the source; known once DONE."""


class Transport(Protocol):
    """One node's end of all its transfers."""

    @property
    def endpoint(self) -> str:
        """Where peers reach this node."""

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        """Blocks are read from and written to this pool from now on."""

    def peer_layout(self, peer: str) -> BlockLayout:
        """What blocks look like at the peer. Raises PeerUnreachable."""

    def open(self, ticket: HandoffTicket, block_ids: Sequence[int]) -> None:
        """A peer may write to these blocks of ours, and to no others, under this ticket."""

    def write(self, peer: str, ticket: HandoffTicket, blocks: Sequence[tuple[int, int]]) -> Write:
        """Start to copy (our block, the peer's block) pairs."""

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message. Raises PeerUnreachable. Messages to one peer stay in order."""

    def receive(self) -> Sequence[bytes]:
        """The messages that have arrived since the last call."""

    def fence(self, ticket: HandoffTicket) -> bool:
        """Close the ticket. True is proof that no write under it can land from now on.

        False: not proven yet, ask again.
        """

    def close(self) -> None:
        """Withdraw from all peers; returns when nothing reads or writes the pool any more."""
