"""The connector that hands a prefilled request from one node to another.

One object serves both roles: `sources` are hand-offs that this node pushes, `sinks` are those that
it receives. It is used from the engine's thread only, and never waits:

    P  add_source ─ build_connector_meta ─ start_load_kv … request_finished ─ poll: push, commit
    D  add_sink ─ (STARTED) ─ update_state_after_alloc: destination ─ poll: commit ─ get_finished

`poll` moves everything on that can move. What the node has to know it gets from `take_events`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.layout import BlockPoolMemory
from kv_transfer.sink import HandoffSink
from kv_transfer.source import HandoffSource
from kv_transfer.states import HandoffState, Reason
from kv_transfer.transport import PeerUnreachable, Transport
from kv_transfer.wire import (
    BadMessage,
    Cancel,
    Closed,
    Commit,
    Destination,
    Heartbeat,
    Message,
    PrefillStarted,
    decode,
    encode,
)
from protocol import (
    FinishReason,
    HandoffTicket,
    KVConnectorOutput,
    RequestView,
    StepView,
    TransferCounts,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HandoffConfig:
    """How long a hand-off may stay in a state. In seconds."""

    reserve_timeout_s: float = 300.0  # P: until D has blocks; D: until P starts
    transfer_timeout_s: float = 60.0  # then D: without a sign of life; P: for the last push
    heartbeat_s: float = 5.0
    max_early: int = 4096  # starts of requests that D has not been told of yet


class EventKind(enum.Enum):
    STARTED = enum.auto()  # at D: P computes the first chunk, so it is time to reserve
    RESERVED = enum.auto()  # at D: blocks are reserved, P was told
    COMMITTED = enum.auto()  # at D: the KV is here
    LOST = enum.auto()  # at D: the KV will not come
    PUSHED = enum.auto()  # at P: some blocks have arrived at D
    RECOMPUTE = enum.auto()  # at P: D has blocks now, but ours had to be given up
    SENT = enum.auto()  # at P: the hand-off has ended, well or not


@dataclass(frozen=True)
class HandoffEvent:
    """Something that the node has to act on."""

    kind: EventKind
    request_id: str  # the scheduler's
    reason: Reason | None = None
    at: float = 0.0  # the connector's clock


@dataclass(frozen=True)
class Progress:
    """So many tokens of a request are computed, into these blocks, before a step."""

    request_id: str
    table: Sequence[int]
    num_computed_tokens: int


@dataclass(frozen=True)
class HandoffMeta:
    """What a step means for hand-offs that this node pushes."""

    progress: tuple[Progress, ...]
    preempted: tuple[str, ...]


@dataclass
class _Counts:
    blocks: int = 0
    ended: dict[HandoffState, int] = field(default_factory=dict)

    def count(self, state: HandoffState) -> None:
        self.ended[state] = self.ended.get(state, 0) + 1


class HandoffConnector:
    """Pushes and receives the KV of requests; both sides of `KVConnector`."""

    def __init__(
        self, transport: Transport, clock: Callable[[], float], config: HandoffConfig | None = None
    ) -> None:
        self.config = config or HandoffConfig()
        self.sources: dict[str, HandoffSource] = {}
        self.sinks: dict[str, HandoffSink] = {}
        self._transport = transport
        self._clock = clock
        self._outbox: list[tuple[str, Message]] = []
        self._events: list[HandoffEvent] = []
        self._early: dict[HandoffTicket, tuple[PrefillStarted, float]] = {}
        self._recving: dict[str, tuple[int, ...]] = {}
        self._sent: list[str] = []
        self._reserved: list[HandoffSink] = []  # with the step that is being planned
        self._counts = _Counts()
        self._layouts_checked: set[str] = set()

    # ------------------------------------------------------------------ jobs come in

    def add_source(self, ticket: HandoffTicket, peer: str, arrival_time: float) -> None:
        """This node will compute the request and push it to `peer`.

        Raises:
            LayoutMismatch: blocks of the peer do not mean the same as ours.
            PeerUnreachable: there is nobody at `peer`.
        """
        self._check_layout(peer)
        now = self._clock()
        self.sources[str(ticket)] = HandoffSource(
            ticket=ticket,
            peer=peer,
            arrival_time=arrival_time,
            block_size=self._pool.layout.block_size,
            deadline=now + self.config.reserve_timeout_s,
            heartbeat_at=now + self.config.heartbeat_s,
        )

    def abandon_source(self, request_id: str) -> None:
        """The request is wanted no more, wherever its hand-off is. Harmless if there is none."""
        source = self.sources.get(request_id)
        if source is not None:
            source.end(Reason.CANCELLED)

    def add_sink(self, ticket: HandoffTicket, peer: str) -> bool:
        """This node will receive the request from `peer`; whether that has started already."""
        deadline = self._clock() + self.config.reserve_timeout_s
        sink = self.sinks[str(ticket)] = HandoffSink(ticket, peer, deadline=deadline)
        if self._early.pop(ticket, None) is not None:
            sink.started = True
            self._renew(sink)
        return sink.started

    def drop_sink(self, request_id: str, reason: Reason) -> None:
        """Forget a hand-off for which the scheduler was never asked."""
        sink = self.sinks.pop(request_id)
        if not sink.state.ended:
            sink.end(reason)
            self._cancel_peer(sink, reason)
        self._counts.count(sink.state)

    def _check_layout(self, peer: str) -> None:
        if peer in self._layouts_checked:
            return
        theirs = self._transport.peer_layout(peer)
        self._pool.layout.check_same(theirs, self._transport.endpoint, peer)
        self._layouts_checked.add(peer)

    # ------------------------------------------------------------------ the scheduler's side

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        sink = self.sinks.get(request.request_id)
        if sink is None:
            return 0, False  # no hand-off, or a preempted request whose KV came and went
        if sink.state is not HandoffState.RESERVING:
            return None, False  # lost, which the node will hear of before the next step
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        sink = self.sinks.get(request.request_id)
        if sink is None or num_external_tokens == 0:
            return
        block_size = self._pool.layout.block_size
        first_block = (request.num_tokens - num_external_tokens) // block_size
        sink.reserve(first_block, block_ids[first_block:])
        self._reserved.append(sink)

    def _open_reserved(self) -> None:
        """From now on P may write: what was computed before in those blocks has been computed."""
        reserved, self._reserved = self._reserved, []
        for sink in reserved:
            if sink.state.ended:
                continue  # P gave up meanwhile
            self._transport.open(sink.ticket, sink.block_ids)
            sink.opened = True
            self._tell(EventKind.RESERVED, sink.request_id)
            if sink.started:  # else P may not even have the job, and is told when it starts
                self._renew(sink)
                self._send_destination(sink)

    def _send_destination(self, sink: HandoffSink) -> None:
        endpoint = self._transport.endpoint
        self._send(sink.peer, Destination(sink.ticket, endpoint, sink.first_block, sink.block_ids))

    def build_connector_meta(self, step: StepView) -> HandoffMeta:
        if not self.sources:
            return HandoffMeta((), ())
        return HandoffMeta(
            progress=tuple(
                Progress(i, tuple(step.block_table(i)), step.computed_before(i))
                for i in step.scheduled_req_ids
                if i in self.sources
            ),
            preempted=tuple(i for i in step.preempted_req_ids if i in self.sources),
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass  # this object is its own worker side and knows already

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        if request.request_id in self.sinks:
            self._release_sink(self.sinks[request.request_id])
            return False  # a load that is under way is held by the scheduler anyway
        source = self.sources.get(request.request_id)
        if source is None:
            return False
        reason = request.finish_reason
        # A request that is computed a second time has had its first token long ago.
        handed_off = reason is FinishReason.LENGTH or source.first_tokens is not None
        if handed_off and reason in (FinishReason.LENGTH, FinishReason.STOP):
            # The token that was sampled last is not computed, and is not part of the KV.
            source.note_tokens(request.output_token_ids[-1:])
            if not block_ids:  # preempted while the step ran that sampled the token
                self._ask_again(source)
                return False
            source.complete(tuple(block_ids), request.num_tokens - 1)
            self._expect_push(source)
            self._advance(source)  # the next step, which may run already, does not touch them
        elif reason is FinishReason.STOP:
            source.end(Reason.ENDED_BY_FIRST_TOKEN)
        else:
            failed = reason is FinishReason.ERROR
            source.end(Reason.PREFILL_FAILED if failed else Reason.CANCELLED)
        source.pinned = source.writing or not source.state.ended
        return source.pinned

    def revoke_pin(self) -> str | None:
        pins = [source for source in self.sources.values() if source.revocable]
        if not pins:
            return None
        youngest = max(pins, key=lambda source: (source.arrival_time, source.request_id))
        youngest.lose_blocks()
        return youngest.request_id

    # ------------------------------------------------------------------ the worker's side

    def register_kv_caches(
        self, pool: BlockPoolMemory, on_activity: Callable[[], None] = lambda: None
    ) -> None:
        self._pool = pool
        self._transport.register(pool, on_activity)

    def start_load_kv(self, meta: object) -> None:
        assert isinstance(meta, HandoffMeta)
        # Hand-offs may have ended since the step was planned.
        for request_id in meta.preempted:
            if request_id in self.sources:
                self.sources[request_id].lose_blocks()
        for progress in meta.progress:
            source = self.sources.get(progress.request_id)
            if source is not None:
                source.progress(progress.table, progress.num_computed_tokens)
                self._announce(source)
                self._advance(source)
        self._open_reserved()
        self._flush()

    def get_finished(self) -> KVConnectorOutput:
        self.poll()
        recving, self._recving = self._recving, {}
        sent, self._sent = self._sent, []
        return KVConnectorOutput(finished_recving=recving, finished_sending=tuple(sent))

    def shutdown(self) -> None:
        for source in list(self.sources.values()):
            source.end(Reason.CANCELLED)
            self._advance(source)
            if not source.writing:
                self._end_source(source)
        for sink in self.sinks.values():
            if not sink.state.ended:
                self._cancel_peer(sink, Reason.CANCELLED)
        self._flush()
        self._transport.close()

    # ------------------------------------------------------------------ moving on

    def poll(self) -> None:
        """Take in messages, note what has ended, push what can be pushed. Never waits."""
        for data in self._transport.receive():
            self._receive(data)
        now = self._clock()
        for source in list(self.sources.values()):
            self._advance(source)
            self._settle_source(source, now)
        for sink in list(self.sinks.values()):
            self._settle_sink(sink, now)
        for ticket, (started, deadline) in list(self._early.items()):
            if now > deadline:
                del self._early[ticket]
                self._refuse(started)
        self._flush()

    def take_events(self) -> list[HandoffEvent]:
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> float | None:
        """When `poll` has something to do even if nothing happens, on this connector's clock."""
        # What has ended only waits for the transport, which calls.
        sources = [source for source in self.sources.values() if not source.state.ended]
        times = [source.heartbeat_at for source in sources]
        times += [source.deadline for source in sources if source.waits_for_peer]
        times += [sink.deadline for sink in self.sinks.values() if not sink.state.ended]
        times += [deadline for _, deadline in self._early.values()]
        return min(times, default=None)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way in either direction."""
        return not (self.sources or self.sinks or self._early or self._outbox)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def _tell(self, kind: EventKind, request_id: str, reason: Reason | None = None) -> None:
        self._events.append(HandoffEvent(kind, request_id, reason, self._clock()))

    def _announce(self, source: HandoffSource) -> None:
        if source.announced:
            return
        source.announced = True
        self._send(source.peer, PrefillStarted(source.ticket, self._transport.endpoint))

    def _advance(self, source: HandoffSource) -> None:
        num_pushed = source.advance(self._transport)
        if num_pushed:
            self._counts.blocks += num_pushed
            self._tell(EventKind.PUSHED, source.request_id)

    def _settle_source(self, source: HandoffSource, now: float) -> None:
        if source.all_pushed and not source.state.ended:
            self._send(source.peer, source.commit())
        elif source.waits_for_peer and now > source.deadline:
            source.end(Reason.DEADLINE)
        # Once it has ended, D must not wait for a write that hangs.
        elif not source.state.ended and now > source.heartbeat_at:
            source.heartbeat_at = now + self.config.heartbeat_s
            self._send(source.peer, Heartbeat(source.ticket))
        if source.state.ended and not source.writing:
            self._end_source(source)

    def _end_source(self, source: HandoffSource) -> None:
        """Nothing reads our blocks any more: say so to D, and let the scheduler free them."""
        del self.sources[source.request_id]
        self._counts.count(source.state)
        if source.reason is not None:
            self._send(source.peer, Closed(source.ticket, source.reason))
            logger.info("hand-off %s ended: %s", source.ticket, source.reason)
        if source.pinned:
            self._sent.append(source.request_id)
        self._tell(EventKind.SENT, source.request_id, source.reason)

    def _settle_sink(self, sink: HandoffSink, now: float) -> None:
        if not sink.state.ended and now > sink.deadline:
            self._lose(sink, Reason.DEADLINE)
            self._cancel_peer(sink, Reason.DEADLINE)
        if not sink.state.ended:
            return
        # Also where P gave proof: the ticket is over.
        sink.fenced = self._transport.fence(sink.ticket) or sink.fenced
        if not sink.fenced:
            return
        if sink.state is HandoffState.COMMITTED or sink.released:
            del self.sinks[sink.request_id]
            self._counts.count(sink.state)
            if sink.block_ids:
                self._recving[sink.request_id] = sink.tokens

    def _lose(self, sink: HandoffSink, reason: Reason) -> None:
        sink.end(reason)
        self._tell(EventKind.LOST, sink.request_id, reason)
        logger.info("hand-off %s lost: %s", sink.ticket, reason)

    def _release_sink(self, sink: HandoffSink) -> None:
        """The request has ended here before its KV was there."""
        sink.released = True
        if not sink.state.ended:
            sink.end(Reason.CANCELLED)
            self._cancel_peer(sink, Reason.CANCELLED)

    def _renew(self, sink: HandoffSink) -> None:
        """P has shown that it is alive."""
        deadline = self._clock() + self.config.transfer_timeout_s
        sink.deadline = deadline if sink.started else max(sink.deadline, deadline)

    def _expect_push(self, source: HandoffSource) -> None:
        """P's part is done but for the push, which may not take for ever."""
        deadline = self._clock() + self.config.transfer_timeout_s
        reserved = source.destination is not None
        source.deadline = deadline if reserved else max(source.deadline, deadline)

    # ------------------------------------------------------------------ messages

    def _receive(self, data: bytes) -> None:
        try:
            message = decode(data)
        except BadMessage as error:
            logger.warning("dropped: %s", error)
            return
        match message:
            case PrefillStarted():
                self._on_started(message)
            case Destination():
                self._on_destination(message)
            case Cancel():
                self._on_cancel(message)
            case Heartbeat() | Commit() | Closed():
                self._on_progress(message)

    def _on_started(self, message: PrefillStarted) -> None:
        sink = self.sinks.get(str(message.ticket))
        if sink is not None:
            sink.started = True
            self._renew(sink)
            self._tell(EventKind.STARTED, sink.request_id)
            if sink.opened:
                self._send_destination(sink)
        elif len(self._early) < self.config.max_early:
            deadline = self._clock() + self.config.transfer_timeout_s
            self._early[message.ticket] = (message, deadline)
        else:
            self._refuse(message)

    def _refuse(self, message: PrefillStarted) -> None:
        cancel = Cancel(message.ticket, Reason.DEADLINE, self._transport.endpoint)
        self._send(message.source, cancel)

    def _on_destination(self, message: Destination) -> None:
        source = self.sources.get(str(message.ticket))
        if source is None:
            self._send(message.sender, Closed(message.ticket, Reason.PEER_CANCELLED))
            return
        if source.state is not HandoffState.RESERVING:
            return
        source.reserve(message)
        self._expect_push(source)
        if source.first_tokens is not None and not source.pinned:
            self._ask_again(source)

    def _ask_again(self, source: HandoffSource) -> None:
        """The blocks of a request that has its token are lost: once D has room, compute them."""
        if source.destination is not None:
            self._tell(EventKind.RECOMPUTE, source.request_id)
        else:
            self._expect_push(source)

    def _on_cancel(self, message: Cancel) -> None:
        source = self.sources.get(str(message.ticket))
        if source is None:  # nothing of it is under way here, which is what D wants to know
            self._send(message.sender, Closed(message.ticket, Reason.PEER_CANCELLED))
            return
        source.end(Reason.PEER_CANCELLED)

    def _on_progress(self, message: Heartbeat | Commit | Closed) -> None:
        sink = self.sinks.get(str(message.ticket))
        if sink is None:
            return
        match message:
            case Heartbeat():
                self._renew(sink)
            case Commit():
                sink.fenced = True
                if not sink.state.ended:
                    self._on_commit(sink, message)
            case Closed():
                sink.fenced = True
                if not sink.state.ended:
                    self._lose(sink, message.reason)

    def _on_commit(self, sink: HandoffSink, commit: Commit) -> None:
        if sink.accept(commit, self._pool):
            self._tell(EventKind.COMMITTED, sink.request_id)
        else:
            self._lose(sink, Reason.CHECKSUM)

    def _cancel_peer(self, sink: HandoffSink, reason: Reason) -> None:
        self._send(sink.peer, Cancel(sink.ticket, reason, self._transport.endpoint))

    def _send(self, peer: str, message: Message) -> None:
        self._outbox.append((peer, message))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        for peer, message in outbox:
            try:
                self._transport.notify(peer, encode(message))
            except PeerUnreachable as error:
                self._lose_peer(peer, error)

    def _lose_peer(self, peer: str, error: PeerUnreachable) -> None:
        """End what is under way with it; if nothing is, nobody misses it."""
        sources = [s for s in self.sources.values() if s.peer == peer and not s.state.ended]
        sinks = [s for s in self.sinks.values() if s.peer == peer and not s.state.ended]
        if sources or sinks:
            logger.warning("%s: %d hand-offs are lost", error, len(sources) + len(sinks))
        for source in sources:
            source.end(Reason.PEER_LOST)
        for sink in sinks:
            self._lose(sink, Reason.PEER_LOST)

    # ------------------------------------------------------------------ looking in from outside

    def counts(self) -> TransferCounts:
        ended = self._counts.ended
        return TransferCounts(
            active=len(self.sources) + len(self.sinks),
            committed=ended.get(HandoffState.COMMITTED, 0),
            aborted=ended.get(HandoffState.ABORTED, 0),
            expired=ended.get(HandoffState.EXPIRED, 0),
            failed=ended.get(HandoffState.FAILED, 0),
            blocks=self._counts.blocks,
            bytes=self._counts.blocks * self._pool.layout.bytes_per_block,
        )
