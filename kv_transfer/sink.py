"""D's end of one hand-off: the blocks that are reserved for it, and what has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.digest import Digest, Digester
from kv_transfer.geometry import Placement
from kv_transfer.layout import BlockLayout
from kv_transfer.states import HandoffState, Reason, ended_state
from kv_transfer.wire import Commit, Destination
from protocol import HandoffTicket


@dataclass
class HandoffSink:
    """Blocks of one request, from `peer` to here.

        reserve ─► opened ─► offered ─► commit, verified
           ▲         └─────────┴── take_back, if P has not begun
           └──────────────────────────┘

    `fenced` is proof that P can write to `block_ids` no more; before that, they may not be handed
    out again, whatever happened to the request. Once there is proof, a hand-off that has failed can
    have an *heir*: from another P, into the same blocks. Until it has, the blocks are *kept*.
    """

    ticket: HandoffTicket
    peer: str
    request_id: str = ""  # the scheduler's name; that of the first attempt, if there are heirs
    started_at: float = 0.0
    state: HandoffState = HandoffState.RESERVING
    reason: Reason | None = None
    detail: str = ""
    reservation: int = 0  # the number of the last one
    first_block: int = 0
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0  # whose KV is to come, D's own included
    tokens: tuple[int, ...] = ()  # came with the commit
    deadline: float = 0.0
    ask_at: float = 0.0  # again, for what was not answered
    started: bool = False  # P has started: it lives, and gives signs of it
    opened: bool = False  # the transport lets P write
    inherited: bool = False  # the blocks are those of an attempt before
    offered: bool = False  # P knows the blocks
    revoking: bool = False  # P was asked to give them back
    released: bool = False  # the request has ended here; only its blocks remain
    fenced: bool = False
    commit: Commit | None = None  # being verified
    _digest: Digest | None = None

    def __post_init__(self) -> None:
        self.request_id = self.request_id or str(self.ticket)

    @property
    def kept(self) -> bool:
        """Whether P is lost, and the request waits for another."""
        return self.state.ended and self.state is not HandoffState.COMMITTED and not self.released

    @property
    def revocable(self) -> bool:
        """Whether blocks are reserved and, as far as is known here, P does not write (yet)."""
        if self.state is HandoffState.READY:
            return self.commit is None
        return self.kept and self.fenced and bool(self.block_ids)

    def reserve(self, first_block: int, block_ids: Sequence[int], num_tokens: int) -> None:
        """The scheduler gave blocks; `first_block` is the number of the first in the prompt."""
        self.state = self.state.then(HandoffState.READY)
        self.reservation += 1
        self.first_block = first_block
        self.block_ids = tuple(block_ids)
        self.num_tokens = num_tokens

    def destination(self) -> Destination:
        self.offered = True
        return Destination(self.ticket, self.reservation, self.first_block, self.block_ids)

    def take_back(self) -> None:
        """The blocks are the scheduler's again. P cannot write to them, or does not know them."""
        if not self.state.ended:
            self.state = self.state.then(HandoffState.RESERVING)
        self.block_ids = ()
        self.inherited = self.opened = self.offered = self.revoking = False

    def heir(
        self, ticket: HandoffTicket, peer: str, started_at: float, deadline: float
    ) -> HandoffSink:
        """A hand-off of the same request, from another P, into the blocks that there are."""
        assert self.kept
        assert self.fenced
        reserved = bool(self.block_ids)
        return HandoffSink(
            ticket,
            peer,
            self.request_id,
            started_at=started_at,
            deadline=deadline,
            state=HandoffState.READY if reserved else HandoffState.RESERVING,
            reservation=int(reserved),
            inherited=reserved,
            first_block=self.first_block,
            block_ids=self.block_ids,
            num_tokens=self.num_tokens,
        )

    def push_begins(self) -> None:
        if self.state is HandoffState.READY:
            self.state = self.state.then(HandoffState.PUSHING)
        self.revoking = False

    def accept(self, commit: Commit, digester: Digester, layout: BlockLayout) -> bool:
        """All blocks are here, says P: begin to look whether that is so. False: it cannot be."""
        self.commit = commit
        if not self.block_ids or commit.num_tokens != self.num_tokens:
            self.end(Reason.LAYOUT, f"{commit.num_tokens} tokens came instead of {self.num_tokens}")
            return False
        if commit.checksums:
            size = layout.block_size
            ours = Placement(layout, self.block_ids, self.first_block)
            starts = range(self.first_block * size, self.num_tokens, size)
            self._digest = digester.start(
                [ours.runs(start, min(start + size, self.num_tokens)) for start in starts]
            )
        return True

    def verified(self) -> bool:
        """Whether the commit is looked through; if so the hand-off has ended, one way or other."""
        if self.commit is None or self.state.ended:
            return False
        if self._digest is not None and self._digest.values is None:
            return False
        if self._digest is not None and self._digest.values != self.commit.checksums:
            self.end(Reason.CHECKSUM)
            return True
        self.tokens = self.commit.token_ids
        self.state = self.state.then(HandoffState.COMMITTED)
        return True

    def end(self, reason: Reason, detail: str = "") -> None:
        """End unhappily; the first reason stays."""
        if not self.state.ended:
            self.state = self.state.then(ended_state(reason))
            self.reason, self.detail = reason, detail
            self.revoking = False  # all of it is to be given up now
