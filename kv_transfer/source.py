"""P's end of one hand-off: what is computed, and which of it is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.digest import Digest, Digester
from kv_transfer.geometry import Placement, copies
from kv_transfer.layout import BlockLayout, PeerPool
from kv_transfer.states import HandoffState, Reason, ended_state
from kv_transfer.transport import Transport, Write, WriteState
from kv_transfer.wire import Commit, Destination
from protocol import HandoffTicket


@dataclass(frozen=True)
class _Part:
    """What a write copies: the tokens from `start` to `end`, in these layers or in all."""

    start: int
    end: int
    layers: range | None
    num_bytes: int


@dataclass
class HandoffSource:
    """KV of one request, from here to `peer`, in tokens.

        token   0 ... first of D's blocks ... pushed ... ready ............. num_tokens
                | D has them              | at D    | one write | not computed yet
                                                                 └ one write of some layers, while
                                                                   the last chunk is computed

    At most one write and one digest are under way. If the request is preempted its blocks change
    under them, so they are *void*: what they copied or read does not count.
    """

    ticket: HandoffTicket
    peer: str
    arrival_time: float
    layout: BlockLayout
    with_checksums: bool = True
    known_tokens: tuple[int, ...] = ()  # that go with the commit, whatever is sampled
    started_at: float = 0.0
    state: HandoffState = HandoffState.RESERVING
    reason: Reason | None = None
    detail: str = ""
    peer_pool: PeerPool | None = None  # known, and compatible with ours
    destination: Destination | None = None
    num_revoked: int = 0  # reservations up to this one are void
    announced: bool = False  # P has started, and D was told
    table: Sequence[int] = ()
    ready: int = 0  # tokens whose KV is what it will be at the end
    pushed: int = 0  # tokens that are at D, or that D had
    num_tokens: int = 0  # whose KV is to be handed over; 0: not known yet
    first_tokens: tuple[int, ...] | None = None  # sampled: everything is computed
    recomputing: bool = False  # for its KV alone: the token is known
    pinned: bool = False  # the request has ended, and the scheduler keeps its blocks for us
    heartbeat_at: float = 0.0
    deadline: float = 0.0
    num_bytes: int = 0  # that have been pushed
    _chunk_end: int = 0  # of the last chunk, while it is computed and goes layer by layer
    _layers_done: int = 0  # of that chunk
    _layers_pushed: int = 0  # of what is in front of its end
    _write: Write | None = None
    _part: _Part | None = None
    _void: bool = False
    _digest: Digest | None = None
    _checksums: dict[int, int] = field(default_factory=dict)  # by number of D's block

    @property
    def request_id(self) -> str:
        """The scheduler's name of this attempt."""
        return str(self.ticket)

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
    def untouched(self) -> bool:
        """Whether nothing was or is being written to D's blocks."""
        return self.state in (HandoffState.RESERVING, HandoffState.READY)

    @property
    def all_pushed(self) -> bool:
        return (
            self.first_tokens is not None
            and self.destination is not None
            and self.pinned
            and not self.writing
            and self.pushed >= self.num_tokens
            and self._next_digest >= self._num_blocks
        )

    # ------------------------------------------------------------------ what P's scheduler does

    def progress(self, table: Sequence[int], num_computed: int, end: int, layerwise: bool) -> None:
        """A step begins that computes the tokens from `num_computed` to `end` into `table`.

        Everything before is computed, but for a request that starts with this step: what it found
        in the cache may be computed in this very step, by another request.
        """
        starts = not self.table
        self.table = table
        size = self.layout.block_size
        self.ready = 0 if starts else num_computed // size * size
        is_last = end >= self.num_tokens > 0
        self._chunk_end = end if layerwise and is_last else 0
        self._layers_done = 0

    def layers_computed(self, count: int) -> None:
        """So many layers of the step are in the pool."""
        self._layers_done = count

    def note_tokens(self, tokens: Sequence[int]) -> None:
        """These were sampled after the prompt. What a second run samples is the same."""
        if self.first_tokens is None:
            self.first_tokens = self.known_tokens or tuple(tokens)

    @property
    def knows_tokens(self) -> bool:
        """Whether what is sampled does not matter: the client has it already."""
        return bool(self.known_tokens) or self.first_tokens is not None

    def complete(self, table: Sequence[int], num_tokens: int) -> None:
        """All `num_tokens` tokens are computed."""
        self.table = table
        self.ready = self.num_tokens = num_tokens
        self.pinned = True

    def lose_blocks(self) -> None:
        """The blocks belong to somebody else from now on.

        What is at D stays there, but only as far as its checksums are known: they are those of
        what was pushed, and a second run may not give the same to the last bit.
        """
        self.table = ()
        self.ready = self._chunk_end = self._layers_pushed = 0
        self.pinned = False
        self._void = self.writing
        self._digest = None
        if self.with_checksums and self.pushed:
            self.pushed = min(self.pushed, self._next_digest * self._their_size)

    def lose_from(self, num_valid: int) -> None:
        """Tokens from here on were not computed from what they should be: they are once more.

        What has been pushed of them is pushed again, into the same blocks of D.
        """
        self.ready = min(self.ready, num_valid)
        self._chunk_end = self._layers_pushed = 0
        self._void = self.writing
        self._digest = None
        self.pushed = min(self.pushed, num_valid)
        if self._checksums:
            whole = num_valid // self._their_size
            self._checksums = {n: c for n, c in self._checksums.items() if n < whole}

    # ------------------------------------------------------------------ what D does

    def reserve(self, destination: Destination) -> None:
        """D has blocks."""
        self.state = self.state.then(HandoffState.READY)
        self.destination = destination

    def revoke(self, reservation: int) -> None:
        """D has its blocks back, or will not get those of this reservation."""
        self.num_revoked = max(self.num_revoked, reservation)
        if self.destination is not None and self.destination.reservation <= self.num_revoked:
            assert self.untouched
            self.destination = None
            self.state = self.state.then(HandoffState.RESERVING)
            self._checksums.clear()
            self._digest = None
            self.pushed = 0

    # ------------------------------------------------------------------ moving on

    def advance(self, transport: Transport, digester: Digester) -> int:
        """Note what has ended and start what can start; returns the tokens that arrived."""
        arrived = self._finish_write()
        self._finish_digest()
        if self.destination is None or self.peer_pool is None or self.state.ended:
            return arrived
        self._start_digest(digester, self.destination)
        if not self.writing:
            self._start_write(transport, self.destination, self.peer_pool)
        return arrived

    @property
    def _their_size(self) -> int:
        assert self.peer_pool is not None
        return self.peer_pool.layout.block_size

    @property
    def _next_token(self) -> int:
        first = self.destination.first_block * self._their_size if self.destination else 0
        return max(first, self.pushed)

    @property
    def _num_blocks(self) -> int:
        return -(-self.num_tokens // self._their_size)

    def _next_part(self) -> tuple[int, range | None] | None:
        """Up to which token, and in which layers, something can go."""
        complete = self.ready == self.num_tokens > 0
        chunk_end, layers = self._chunk_end, range(self._layers_pushed, self._layers_done)
        if self._layers_pushed and complete:
            return self.ready, range(self._layers_pushed, self.layout.num_layers)
        if self.ready > self._next_token and not self._layers_pushed:
            return self.ready, None
        if chunk_end > self._next_token and layers:
            return chunk_end, layers
        return None

    def _start_write(
        self, transport: Transport, destination: Destination, peer_pool: PeerPool
    ) -> None:
        part = self._next_part()
        if part is None:
            return
        start, (end, layers) = self._next_token, part
        theirs = Placement(peer_pool.layout, destination.block_ids, destination.first_block)
        if theirs.end < end:
            self.end(
                Reason.LAYOUT, f"{self.peer} has room for {theirs.end} tokens, but there are {end}"
            )
            return
        if self.state is HandoffState.READY:
            self.state = self.state.then(HandoffState.PUSHING)
        extents = copies(Placement(self.layout, self.table), theirs, start, end, layers)
        self._part = _Part(start, end, layers, extents.num_bytes)
        self._write = transport.write(self.peer, self.ticket, extents)

    def _finish_write(self) -> int:
        write, part = self._write, self._part
        if write is None or part is None or write.state is WriteState.PENDING:
            return 0
        self._write = self._part = None
        if self._void:
            self._void = False
            return 0
        if write.state is WriteState.FAILED:
            self.end(Reason.WRITE_FAILED)
            return 0
        self.num_bytes += part.num_bytes
        if part.layers is not None and part.layers.stop < self.layout.num_layers:
            self._layers_pushed = part.layers.stop
            return 0
        if part.layers is not None:  # else the last chunk may only begin
            self._layers_pushed = self._chunk_end = 0
        self.pushed = part.end
        return part.end - part.start

    # ------------------------------------------------------------------ checksums

    @property
    def _next_digest(self) -> int:
        """The number of D's block whose checksum comes next."""
        first = self.destination.first_block if self.destination is not None else 0
        return first + len(self._checksums) if self.with_checksums else self._num_blocks

    def _start_digest(self, digester: Digester, destination: Destination) -> None:
        if not self.with_checksums or self._digest is not None:
            return
        size, start = self._their_size, self._next_digest
        complete = self.ready == self.num_tokens > 0
        end = self._num_blocks if complete else self.ready // size
        if end <= start:
            return
        ours = Placement(self.layout, self.table)
        self._digest = digester.start(
            [ours.runs(n * size, min((n + 1) * size, self.ready)) for n in range(start, end)]
        )

    def _finish_digest(self) -> None:
        digest = self._digest
        if digest is None or digest.values is None:
            return
        self._digest = None
        self._checksums.update(enumerate(digest.values, self._next_digest))

    # ------------------------------------------------------------------ the end

    def commit(self) -> Commit:
        """The message that gives D the request. All blocks are pushed."""
        assert self.all_pushed
        assert self.first_tokens is not None
        self.state = self.state.then(HandoffState.COMMITTED)
        checksums = tuple(self._checksums[number] for number in sorted(self._checksums))
        return Commit(self.ticket, self.num_tokens, self.first_tokens, checksums)

    def end(self, reason: Reason, detail: str = "") -> None:
        """End unhappily; the first reason stays."""
        if not self.state.ended:
            self.state = self.state.then(ended_state(reason))
            self.reason, self.detail = reason, detail
