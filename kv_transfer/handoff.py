"""The connector that hands a prefilled request from one node to another.

One object serves both roles: `sources` are hand-offs that this node pushes (push_side.py), `sinks`
are those that it receives (receive_side.py). It is used from the engine's thread only, but for
`save_kv_layer`, and never waits:

    P  add_source ─ build_connector_meta ─ start_load_kv … request_finished ─ poll: push, commit
    D  add_sink ─ (STARTED) ─ update_state_after_alloc: destination ─ poll: commit ─ get_finished
                                       ▲ (LOST) ─ retarget_sink: from another P

`poll` moves everything on that can move. What the node has to know it gets from `take_events`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kv_transfer.connector import BaseConnector
from kv_transfer.desk import Desk
from kv_transfer.digest import Digester, ThreadDigester
from kv_transfer.envelope import BadMessage
from kv_transfer.events import HandoffEvent
from kv_transfer.handoff_config import HandoffConfig, OnTransferFailure
from kv_transfer.layout import BlockPoolMemory
from kv_transfer.live import live_transfers
from kv_transfer.push_side import Progress, PushSide
from kv_transfer.receive_side import ReceiveSide
from kv_transfer.sink import HandoffSink
from kv_transfer.source import HandoffSource
from kv_transfer.states import HandoffState, Reason
from kv_transfer.transport import PeerLost, Received, Transport
from kv_transfer.wire import FromDecode, decode
from protocol import (
    FinishReason,
    HandoffTicket,
    KVConnectorOutput,
    LiveTransfer,
    RequestView,
    StepView,
    TransferCounts,
)

logger = logging.getLogger(__name__)

MakeDigester = Callable[[BlockPoolMemory, Callable[[], None]], Digester]


@dataclass(frozen=True)
class HandoffMeta:
    """What a step means for hand-offs that this node pushes."""

    progress: tuple[Progress, ...]
    preempted: tuple[str, ...]


class HandoffConnector(BaseConnector):
    """Pushes and receives the KV of requests; both sides of `KVConnector`."""

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float],
        config: HandoffConfig | None = None,
        *,
        make_digester: MakeDigester = ThreadDigester,
    ) -> None:
        self.config = config or HandoffConfig()
        self._transport = transport
        self._make_digester = make_digester
        self._clock = clock
        self._desk = Desk(transport, clock, self.config)
        self._push = PushSide(self._desk)
        self._receive = ReceiveSide(self._desk)
        self._layers_done = 0  # of the step that runs; written by whoever computes it
        self._engine_thread = 0

    @property
    def sources(self) -> dict[str, HandoffSource]:
        return self._push.sources

    @property
    def sinks(self) -> dict[str, HandoffSink]:
        return self._receive.sinks

    # ------------------------------------------------------------------ jobs come in

    def add_source(
        self,
        ticket: HandoffTicket,
        peer: str,
        arrival_time: float,
        known_tokens: Sequence[int] = (),
    ) -> None:
        """This node will compute the request and push it to `peer`.

        `known_tokens` go with it instead of what is sampled: the client has them already.
        Raises PeerUnreachable: nothing that this node speaks leads to `peer`.
        """
        self._push.add(ticket, peer, arrival_time, tuple(known_tokens))

    def abandon_source(self, request_id: str) -> None:
        """The request is wanted no more, wherever its hand-off is. Harmless if there is none."""
        self._push.abandon(request_id, Reason.CANCELLED)

    def leave(self, request_id: str) -> None:
        """This node drains, and is about to end the request: the peer hears why.

        Harmless if there is no hand-off of it.
        """
        self._push.abandon(request_id, Reason.DRAINING)
        self._receive.abandon(request_id, Reason.DRAINING)

    def moves(self, request_id: str) -> bool:
        """Whether the push of this request goes on by itself, as the peer has room, or is over."""
        source = self.sources.get(request_id)
        return source is None or source.state in (HandoffState.READY, HandoffState.PUSHING)

    def add_sink(self, ticket: HandoffTicket, peer: str) -> bool:
        """This node will receive the request from `peer`; whether that has started already.

        Raises PeerUnreachable: nothing that this node speaks leads to `peer`.
        """
        return self._receive.add(ticket, peer)

    def retarget_sink(self, request_id: str, ticket: HandoffTicket, peer: str) -> bool:
        """This node will receive a request that the scheduler knows from `peer` instead.

        It keeps its place and its blocks. False: its KV is here already; or the P that had it may
        still write to its blocks, so that the request has to end, and to start over with others.
        Raises PeerUnreachable, as `add_sink`: nothing has changed.
        """
        return self._receive.retarget(request_id, ticket, peer)

    def drop_sink(self, request_id: str, reason: Reason) -> None:
        """Forget a hand-off for which the scheduler was never asked."""
        self._receive.drop(request_id, reason)

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
        self._push.admitted(request)
        sink = self.sinks.get(request.request_id)
        if sink is None or num_external_tokens == 0:
            return
        block_size = self._desk.pool.layout.block_size
        first_block = (request.num_tokens - num_external_tokens) // block_size
        self._receive.reserve(sink, first_block, block_ids[first_block:], request.num_tokens)

    def build_connector_meta(self, step: StepView) -> HandoffMeta:
        if not self.sources:
            return HandoffMeta((), ())
        return HandoffMeta(
            progress=tuple(
                Progress(
                    i, tuple(step.block_table(i)), step.computed_before(i), step.computed_after(i)
                )
                for i in step.scheduled_req_ids
                if i in self.sources
            ),
            preempted=tuple(i for i in step.preempted_req_ids if i in self.sources),
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._push.lose_loaded(output.invalid_block_ids)

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        if request.request_id in self.sinks:
            self._receive.release(self.sinks[request.request_id])
            return False  # a load that is under way is held by the scheduler anyway
        source = self.sources.get(request.request_id)
        if source is None:
            return False
        reason = request.finish_reason
        # Of some requests the first token is known, whatever is sampled now.
        handed_off = reason is FinishReason.LENGTH or source.knows_tokens
        if handed_off and reason in (FinishReason.LENGTH, FinishReason.STOP):
            return self._push.completed(source, request, block_ids)
        if reason is FinishReason.STOP:
            source.end(Reason.ENDED_BY_FIRST_TOKEN)
        else:
            failed = reason is FinishReason.ERROR
            source.end(Reason.PREFILL_FAILED if failed else Reason.CANCELLED)
        source.pinned = source.writing
        return source.pinned

    def revoke_pin(self) -> str | None:
        return self._push.revoke_pin()

    def revoke_reservation(self, request_id: str) -> bool:
        return self._receive.revoke(request_id)

    # ------------------------------------------------------------------ the worker's side

    def register_kv_caches(
        self, pool: BlockPoolMemory, on_activity: Callable[[], None] = lambda: None
    ) -> None:
        self._on_activity = on_activity
        self._desk.pool = pool
        self._desk.digester = self._make_digester(pool, on_activity)
        self._transport.register(pool, on_activity)

    def start_load_kv(self, meta: object) -> None:
        assert isinstance(meta, HandoffMeta)
        self._engine_thread = threading.get_ident()
        self._push.progress(meta.progress, meta.preempted)
        self._layers_done = 0
        self._receive.open_reserved()
        self._flush()

    @property
    def saves_layers(self) -> bool:
        return self.config.layerwise

    @property
    def steps_may_overlap(self) -> bool:
        """Blocks are read while they are kept for a request, and loads are asynchronous.

        Not layer by layer: the layers that are told of are those of the step that has begun.
        """
        return not self.config.layerwise

    def save_kv_layer(self, layer: int) -> None:
        """This layer of the step that runs is in the pool: it may travel."""
        self._layers_done = layer + 1
        if threading.get_ident() == self._engine_thread:
            self.poll()
        else:
            self._on_activity()

    def get_finished(self) -> KVConnectorOutput:
        self.poll()
        push, receive = self._push, self._receive
        recving, receive.recving = receive.recving, {}
        revoked, receive.revoked = receive.revoked, []
        sent, push.sent = push.sent, []
        return KVConnectorOutput(
            finished_recving=recving,
            finished_sending=tuple(sent),
            revoked_recving=tuple(revoked),
        )

    def shutdown(self) -> None:
        self._push.stop()
        self._receive.stop()
        self._flush()
        self._transport.close()
        self._desk.digester.close()

    # ------------------------------------------------------------------ moving on

    def poll(self) -> None:
        """Take in messages, note what has ended, push what can be pushed. Never waits."""
        for received in self._transport.receive():
            self._take(received)
        self._lose(self._transport.lost_peers())
        if self.config.layerwise:
            self._push.layers_computed(self._layers_done)
        self._push.settle()
        self._receive.settle()
        self._flush()

    def take_events(self) -> list[HandoffEvent]:
        events, self._desk.events = self._desk.events, []
        return events

    def next_deadline(self) -> float | None:
        """When `poll` has something to do even if nothing happens, on this connector's clock."""
        times = (self._push.next_deadline(), self._receive.next_deadline())
        return min((time for time in times if time is not None), default=None)

    def note_outcome(self, outcome: OnTransferFailure) -> None:
        """What this node does about a hand-off that failed."""
        self._desk.outcomes[outcome] += 1

    @property
    def idle(self) -> bool:
        """Whether nothing is under way in either direction."""
        return self._push.idle and self._receive.idle and self._desk.empty

    @property
    def has_events(self) -> bool:
        return bool(self._desk.events)

    def _take(self, received: Received) -> None:
        try:
            message = decode(received.data)
        except BadMessage as error:
            logger.warning("dropped what %s sent: %s", received.peer, error)
            return
        if isinstance(message, FromDecode):
            self._push.receive(received.peer, message)
        else:
            self._receive.receive(received.peer, message)

    def _flush(self) -> None:
        self._lose(self._desk.flush())

    def _lose(self, lost: Iterable[PeerLost]) -> None:
        """End what is under way with these; if nothing is, nobody misses them."""
        for peer, error in lost:
            count = self._push.lose_peer(peer, error) + self._receive.lose_peer(peer, error)
            if count:
                logger.warning("%s; lost hand-offs with it: %d", error, count)

    # ------------------------------------------------------------------ looking in from outside

    def counts(self) -> TransferCounts:
        """Since the start; of what is under way only the number."""
        desk, push, ended = self._desk, self._push, self._desk.ended
        return TransferCounts(
            active=push.num_active + len(self.sinks),
            committed=ended[HandoffState.COMMITTED],
            aborted=ended[HandoffState.ABORTED],
            expired=ended[HandoffState.EXPIRED],
            failed=ended[HandoffState.FAILED],
            blocks=push.num_blocks,
            bytes=push.num_bytes,
            seconds=push.seconds,
            reasons={reason.value: count for reason, count in desk.failures.items()},
            outcomes=dict(desk.outcomes),
            retargeted=dict(desk.retargeted),
        )

    def live(self) -> tuple[LiveTransfer, ...]:
        """What is under way. Any thread may look, and sees what changes as it is."""
        return live_transfers(list(self.sources.values()), list(self.sinks.values()), self._clock())
