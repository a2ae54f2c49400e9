"""P's side of a connector: the hand-offs that this node pushes.

    add ─ progress … completed ─ settle: push, commit ─ Arrived

Nothing here waits. What is asked of D and not answered is asked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_transfer.desk import Desk, reason_of
from kv_transfer.events import EventKind
from kv_transfer.layout import LayoutMismatch
from kv_transfer.source import HandoffSource
from kv_transfer.states import HandoffState, Reason
from kv_transfer.transport import PeerUnreachable
from kv_transfer.wire import (
    Arrived,
    Cancel,
    Closed,
    Commit,
    Destination,
    FromDecode,
    Heartbeat,
    PrefillStarted,
    Pushing,
    Revoke,
    Revoked,
)
from protocol import HandoffTicket, RequestView


@dataclass(frozen=True)
class Progress:
    """A step computes the tokens from `num_computed` to `end` of a request into `table`."""

    request_id: str
    table: Sequence[int]
    num_computed: int
    end: int


@dataclass
class _Unanswered:
    """A commit that D has not confirmed yet."""

    peer: str
    commit: Commit
    repeat_at: float
    deadline: float


class PushSide:
    """All sources of a node, by the scheduler's name of the request."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.sources: dict[str, HandoffSource] = {}
        self.sent: list[str] = []  # whose blocks the scheduler may have back
        self.num_blocks = 0  # that have arrived somewhere
        self.num_bytes = 0
        self.seconds = 0.0  # from the first byte to the commit, of those that were committed
        self._commits: dict[HandoffTicket, _Unanswered] = {}
        self._push_began: dict[HandoffTicket, float] = {}

    @property
    def idle(self) -> bool:
        return not (self.sources or self._commits)

    @property
    def num_active(self) -> int:
        return len(self.sources) + len(self._commits)

    # ------------------------------------------------------------------ the scheduler's side

    def add(
        self, ticket: HandoffTicket, peer: str, arrival_time: float, known_tokens: tuple[int, ...]
    ) -> None:
        """Raises PeerUnreachable: there is no way to `peer`."""
        desk, now = self._desk, self._desk.clock()
        peer = desk.transport.resolve(peer)
        desk.transport.connect(peer)
        source = HandoffSource(
            ticket=ticket,
            peer=peer,
            arrival_time=arrival_time,
            layout=desk.pool.layout,
            with_checksums=desk.config.checksums,
            known_tokens=known_tokens,
            started_at=now,
            deadline=now + desk.config.reserve_timeout_s,
            heartbeat_at=now + desk.config.heartbeat_s,
        )
        self.sources[source.request_id] = source
        self._look_at_peer(source)

    def abandon(self, request_id: str, reason: Reason) -> None:
        """The request is wanted here no more. Harmless if there is none."""
        source = self.sources.get(request_id)
        if source is not None:
            source.end(reason)

    def admitted(self, request: RequestView) -> None:
        """The scheduler begins to compute the request."""
        source = self.sources.get(request.request_id)
        if source is not None:
            source.num_tokens = request.num_tokens

    def progress(self, steps: Iterable[Progress], preempted: Iterable[str]) -> None:
        """A step begins. Hand-offs may have ended since it was planned."""
        self.layers_computed(self._desk.pool.layout.num_layers)  # of the step before
        for request_id in preempted:
            if request_id in self.sources:
                self.sources[request_id].lose_blocks()
        for step in steps:
            source = self.sources.get(step.request_id)
            if source is not None:
                layerwise = self._desk.config.layerwise
                source.progress(step.table, step.num_computed, step.end, layerwise)
                self._announce(source)
                self._advance(source)

    def lose_loaded(self, invalid_block_ids: frozenset[int]) -> None:
        """These could not be loaded, so what follows them has to be computed again."""
        for source in self.sources.values():
            bad = [n for n, block_id in enumerate(source.table) if block_id in invalid_block_ids]
            if bad:
                source.lose_from(bad[0] * source.layout.block_size)

    def layers_computed(self, count: int) -> None:
        """So many layers of the step that runs are in the pool."""
        for source in self.sources.values():
            source.layers_computed(count)

    def completed(self, source: HandoffSource, request: RequestView, table: Sequence[int]) -> bool:
        """The request has its first token; whether its blocks are to be kept."""
        # The token that was sampled last is not computed, and is not part of the KV.
        source.note_tokens(request.output_token_ids[-1:])
        source.recomputing = False
        if not table:  # preempted while the step ran that sampled the token
            self._ask_again(source)
            return False
        source.complete(tuple(table), request.num_tokens - 1)
        self._expect_push(source)
        self._advance(source)  # the next step, which may run already, does not touch them
        source.pinned = source.writing or not source.state.ended
        return source.pinned

    def revoke_pin(self) -> str | None:
        """Give up the youngest pin that D has not reserved for."""
        pins = [source for source in self.sources.values() if source.revocable]
        if not pins:
            return None
        youngest = max(pins, key=lambda source: (source.arrival_time, source.request_id))
        youngest.lose_blocks()
        return youngest.request_id

    # ------------------------------------------------------------------ moving on

    def settle(self) -> None:
        """Note what has ended, push what can be pushed, repeat what was not answered."""
        now = self._desk.clock()
        for source in list(self.sources.values()):
            self._look_at_peer(source)
            self._advance(source)
            self._settle(source, now)
        for ticket, unanswered in list(self._commits.items()):
            self._settle_commit(ticket, unanswered, now)

    def next_deadline(self) -> float | None:
        # What has ended only waits for the transport, which calls.
        sources = [source for source in self.sources.values() if not source.state.ended]
        times = [source.heartbeat_at for source in sources]
        times += [source.deadline for source in sources if source.waits_for_peer]
        times += [min(u.repeat_at, u.deadline) for u in self._commits.values()]
        return min(times, default=None)

    def lose_peer(self, peer: str, error: PeerUnreachable) -> int:
        """End what is under way with it; how much that was."""
        mine = [s for s in self.sources.values() if s.peer == peer and not s.state.ended]
        for source in mine:
            source.end(reason_of(error), str(error))
        for ticket in [t for t, u in self._commits.items() if u.peer == peer]:
            del self._commits[ticket]
        return len(mine)

    def stop(self) -> None:
        """Tell all peers that nothing follows; what is being written ends with the transport."""
        for source in list(self.sources.values()):
            source.end(Reason.CANCELLED)
            self._advance(source)
            if not source.writing:
                self._end(source)
        self._commits.clear()

    def _look_at_peer(self, source: HandoffSource) -> None:
        """Before the first byte moves, blocks of the peer must mean the same as ours."""
        if source.peer_pool is not None or source.state.ended:
            return
        try:
            pool = self._desk.transport.peer_pool(source.peer)
            if pool is not None:
                ours = self._desk.transport.endpoint
                source.layout.check_compatible(pool.layout, ours, source.peer)
                source.peer_pool = pool
        except PeerUnreachable as error:
            self.lose_peer(source.peer, error)
        except LayoutMismatch as error:
            source.end(Reason.LAYOUT, str(error))

    def _announce(self, source: HandoffSource) -> None:
        if not source.announced:
            source.announced = True
            self._desk.send(source.peer, PrefillStarted(source.ticket))

    def _advance(self, source: HandoffSource) -> None:
        before = source.num_bytes
        num_tokens = source.advance(self._desk.transport, self._desk.digester)
        self.num_bytes += source.num_bytes - before
        if source.writing and source.ticket not in self._push_began:
            self._push_began[source.ticket] = self._desk.clock()
            self._desk.send(source.peer, Pushing(source.ticket))
        if num_tokens:
            self.num_blocks += -(-num_tokens // source.layout.block_size)
            self._desk.tell(EventKind.PUSHED, source.request_id)

    def _settle(self, source: HandoffSource, now: float) -> None:
        if not source.state.ended and source.all_pushed:
            self._commit(source, now)
        elif source.waits_for_peer and now > source.deadline:
            source.end(Reason.DEADLINE)
        # Once it has ended, D must not wait for a write that hangs.
        elif not source.state.ended and now > source.heartbeat_at:
            source.heartbeat_at = now + self._desk.config.heartbeat_s
            self._give_sign_of_life(source)
        if source.state.ended and not source.writing:
            self._end(source)

    def _give_sign_of_life(self, source: HandoffSource) -> None:
        """Which is the start once more, as long as D has not answered it."""
        asks = source.announced and source.destination is None
        message = PrefillStarted(source.ticket) if asks else Heartbeat(source.ticket)
        self._desk.send(source.peer, message)

    def _commit(self, source: HandoffSource, now: float) -> None:
        commit, config = source.commit(), self._desk.config
        self._desk.send(source.peer, commit)
        self.seconds += now - self._push_began.get(source.ticket, now)
        self._commits[source.ticket] = _Unanswered(
            source.peer, commit, now + config.heartbeat_s, now + config.transfer_timeout_s
        )

    def _settle_commit(self, ticket: HandoffTicket, unanswered: _Unanswered, now: float) -> None:
        if now > unanswered.deadline:
            del self._commits[ticket]
        elif now > unanswered.repeat_at:
            unanswered.repeat_at = now + self._desk.config.heartbeat_s
            self._desk.send(unanswered.peer, unanswered.commit)

    def _end(self, source: HandoffSource) -> None:
        """Nothing reads our blocks any more: say so to D, and let the scheduler free them."""
        del self.sources[source.request_id]
        self._push_began.pop(source.ticket, None)
        self._desk.count(source.state, source.reason)
        if source.reason is not None:
            detail = source.detail[:1024]
            self._desk.send(source.peer, Closed(source.ticket, source.reason, detail))
            self._desk.log_end(source.ticket, source.state, source.reason, detail)
        if source.pinned:
            self.sent.append(source.request_id)
        self._desk.tell(EventKind.SENT, source.request_id, source.reason, source.detail)

    def _expect_push(self, source: HandoffSource) -> None:
        """P's part is done but for the push, which may not take for ever."""
        deadline = self._desk.clock() + self._desk.config.transfer_timeout_s
        reserved = source.destination is not None
        source.deadline = deadline if reserved else max(source.deadline, deadline)

    def _ask_again(self, source: HandoffSource) -> None:
        """The blocks of a request that has its token are lost: once D has room, compute them."""
        if source.recomputing:
            return  # already, for a reservation that was taken back meanwhile
        if source.destination is not None:
            source.recomputing = True
            self._desk.tell(EventKind.RECOMPUTE, source.request_id)
        else:
            self._expect_push(source)

    # ------------------------------------------------------------------ messages

    def receive(self, peer: str, message: FromDecode) -> None:
        match message:
            case Destination():
                self._on_destination(peer, message)
            case Arrived():
                self._on_arrived(peer, message)
            case Cancel():
                source = self._find(peer, message.ticket)
                if source is not None:
                    drains = message.reason is Reason.DRAINING
                    source.end(Reason.DRAINING if drains else Reason.PEER_CANCELLED)
            case Revoke():
                self._on_revoke(peer, message)

    def _find(self, peer: str, ticket: HandoffTicket) -> HandoffSource | None:
        """Its source; if there is none, nothing is under way here, which is what D has to know."""
        source = self.sources.get(str(ticket))
        if source is not None and source.peer == peer:
            return source
        if ticket not in self._commits:
            self._desk.send(peer, Closed(ticket, Reason.PEER_CANCELLED))
        return None

    def _on_arrived(self, peer: str, message: Arrived) -> None:
        unanswered = self._commits.get(message.ticket)
        if unanswered is not None and unanswered.peer == peer:
            del self._commits[message.ticket]

    def _on_destination(self, peer: str, message: Destination) -> None:
        source = self._find(peer, message.ticket)
        if source is None or source.state is not HandoffState.RESERVING:
            return
        if message.reservation <= source.num_revoked:
            return  # it came late: D has given these blocks to somebody else
        source.reserve(message)
        self._expect_push(source)
        if source.first_tokens is not None and not source.pinned:
            self._ask_again(source)

    def _on_revoke(self, peer: str, message: Revoke) -> None:
        source = self._find(peer, message.ticket)
        if source is None or source.state.ended:
            return
        if not source.untouched:
            self._desk.send(peer, Pushing(message.ticket))
            return
        source.revoke(message.reservation)
        source.deadline = self._desk.clock() + self._desk.config.reserve_timeout_s
        self._desk.send(peer, Revoked(message.ticket, message.reservation))
