"""P's end of one hand-off: which blocks are computed, which of them are on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.states import HandoffState, Reason, ended_state
from kv_transfer.transport import Transport, Write, WriteState
from kv_transfer.wire import Commit, Destination
from protocol import HandoffTicket


@dataclass
class HandoffSource:
    """Blocks of one request, from here to `peer`.

        block number   0 ... first_block ... num_pushed ... num_ready ......... num_blocks
                       | D has them       | pushed        | one write | not computed yet

    At most one write is under way. If the request is preempted its blocks change under that
    write, so it is *void*: what it copied does not count and is pushed again once it has ended.
    """

    ticket: HandoffTicket
    peer: str
    arrival_time: float
    block_size: int
    state: HandoffState = HandoffState.RESERVING
    reason: Reason | None = None
    destination: Destination | None = None
    announced: bool = False  # P has started, and D was told
    table: Sequence[int] = ()
    num_ready: int = 0  # blocks of the table that hold what they will hold at the end
    num_pushed: int = 0
    first_tokens: tuple[int, ...] | None = None  # sampled: all blocks are computed
    pinned: bool = False  # the request has ended, and the scheduler keeps its blocks for us
    heartbeat_at: float = 0.0
    deadline: float = 0.0
    _write: Write | None = None
    _write_end: int = 0  # num_pushed once the write is done
    _void: bool = False
    _checksums: dict[int, int] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """The scheduler's name of this attempt."""
        return str(self.ticket)

    @property
    def num_blocks_left(self) -> int:
        return self.num_ready - self._next_block

    @property
    def _next_block(self) -> int:
        first = self.destination.first_block if self.destination is not None else 0
        return max(first, self.num_pushed)

    @property
    def writing(self) -> bool:
        return self._write is not None

    @property
    def waits_for_peer(self) -> bool:
        """Whether P has done its part for now: D has to reserve, or the push has to end."""
        return self.first_tokens is not None and (self.pinned or self.destination is None)

    @property
    def revocable(self) -> bool:
        """Whether its blocks are kept only because D has not reserved any yet."""
        return self.pinned and self.destination is None and not self.writing

    @property
    def all_pushed(self) -> bool:
        return (
            self.first_tokens is not None
            and self.destination is not None
            and self.pinned
            and not self.writing
            and self.num_blocks_left == 0
        )

    def reserve(self, destination: Destination) -> None:
        """D has blocks."""
        self.state = self.state.then(HandoffState.READY)
        self.destination = destination

    def progress(self, table: Sequence[int], num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens are computed, into the blocks of `table`.

        All but for a request that starts with this step: what it found in the cache may be
        computed in this very step, by another request.
        """
        starts = not self.table
        self.table = table
        self.num_ready = 0 if starts else num_computed_tokens // self.block_size

    def note_tokens(self, tokens: Sequence[int]) -> None:
        """These were sampled after the prompt. What a second run samples is the same."""
        if self.first_tokens is None:
            self.first_tokens = tuple(tokens)

    def complete(self, table: Sequence[int], num_tokens: int) -> None:
        """All `num_tokens` tokens are computed."""
        self.table = table
        self.num_ready = -(-num_tokens // self.block_size)  # the partial block travels too
        self.pinned = True

    def lose_blocks(self) -> None:
        """The blocks belong to somebody else from now on."""
        self.table = ()
        self.num_ready = 0
        self.pinned = False
        self._void = self.writing

    def advance(self, transport: Transport) -> int:
        """Note a write that has ended and start the next; returns the blocks that arrived."""
        arrived = self._finish_write()
        if self.destination is None or self.writing or self.state.ended:
            return arrived
        if self.num_blocks_left > 0:
            self._start_write(transport, self.destination)
        return arrived

    def _start_write(self, transport: Transport, destination: Destination) -> None:
        start, end = self._next_block, self.num_ready
        theirs = destination.block_ids[start - destination.first_block :]
        if len(theirs) < end - start:
            self.end(Reason.LAYOUT)  # D believes that the request is shorter
            return
        if self.state is HandoffState.READY:
            self.state = self.state.then(HandoffState.PUSHING)
        pairs = tuple(zip(self.table[start:end], theirs[: end - start], strict=True))
        self._write_end = end
        self._write = transport.write(self.peer, self.ticket, pairs)

    def _finish_write(self) -> int:
        write = self._write
        if write is None or write.state is WriteState.PENDING:
            return 0
        self._write = None
        if self._void:
            self._void = False
            return 0
        if write.state is WriteState.FAILED:
            self.end(Reason.WRITE_FAILED)
            return 0
        start, self.num_pushed = self._next_block, self._write_end
        self._checksums.update(enumerate(write.checksums, start))
        return self.num_pushed - start

    def commit(self) -> Commit:
        """The message that gives D the request. All blocks are pushed."""
        assert self.all_pushed
        assert self.first_tokens is not None
        self.state = self.state.then(HandoffState.COMMITTED)
        checksums = tuple(self._checksums[number] for number in sorted(self._checksums))
        return Commit(self.ticket, self.first_tokens, checksums)

    def end(self, reason: Reason) -> None:
        """End unhappily; the first reason stays."""
        if not self.state.ended:
            self.state = self.state.then(ended_state(reason))
            self.reason = reason
