"""D's end of one hand-off: the blocks that are reserved for it, and what has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kv_transfer.layout import BlockPoolMemory
from kv_transfer.states import HandoffState, Reason, ended_state
from kv_transfer.wire import Commit
from protocol import HandoffTicket


@dataclass
class HandoffSink:
    """Blocks of one request, from `peer` to here.

    `fenced` is proof that P can write to `block_ids` no more; before that, they may not be handed
    out again, whatever happened to the request.
    """

    ticket: HandoffTicket
    peer: str
    state: HandoffState = HandoffState.RESERVING
    reason: Reason | None = None
    first_block: int = 0
    block_ids: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()  # came with the commit
    deadline: float = 0.0
    released: bool = False  # the request has ended here; only its blocks remain
    opened: bool = False  # P may write
    started: bool = False  # P has started: it lives, and gives signs of it
    fenced: bool = False

    @property
    def request_id(self) -> str:
        """The scheduler's name of this attempt."""
        return str(self.ticket)

    def reserve(self, first_block: int, block_ids: Sequence[int]) -> None:
        """The scheduler gave blocks; `first_block` is the number of the first in the prompt."""
        self.state = self.state.then(HandoffState.READY)
        self.first_block = first_block
        self.block_ids = tuple(block_ids)

    def accept(self, commit: Commit, pool: BlockPoolMemory) -> bool:
        """All blocks are here, says P. If so take the token, or else end."""
        if not self._holds(commit, pool):
            self.end(Reason.CHECKSUM)
            return False
        self.state = self.state.then(HandoffState.COMMITTED)
        self.tokens = commit.token_ids
        return True

    def _holds(self, commit: Commit, pool: BlockPoolMemory) -> bool:
        if not self.block_ids:
            return False
        return not commit.checksums or self._checksums_match(commit.checksums, pool)

    def _checksums_match(self, checksums: Sequence[int], pool: BlockPoolMemory) -> bool:
        return len(checksums) == len(self.block_ids) and all(
            xxhash.xxh3_64_intdigest(pool.view(block_id)) == checksum
            for block_id, checksum in zip(self.block_ids, checksums, strict=True)
        )

    def end(self, reason: Reason) -> None:
        """End unhappily; the first reason stays."""
        if not self.state.ended:
            self.state = self.state.then(ended_state(reason))
            self.reason = reason
