"""Two connectors whose schedulers are played by hand, on a clock that is turned by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_transfer import (
    BlockLayout,
    EventKind,
    HandoffConfig,
    HandoffConnector,
    HandoffEvent,
    MemoryHub,
    MemoryTransport,
    Reason,
)
from kv_transfer.wire import Message, decode, encode
from protocol import BlockHash, FinishReason, HandoffTicket
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, GatedPool, make_pool

BLOCK = LAYOUT.block_size

STARTED, RESERVED, COMMITTED = EventKind.STARTED, EventKind.RESERVED, EventKind.COMMITTED
LOST, PUSHED, RECOMPUTE = EventKind.LOST, EventKind.PUSHED, EventKind.RECOMPUTE
SENT = EventKind.SENT

P_TABLE, D_TABLE = (4, 9, 2), (31, 5, 17)  # of a request of 40 tokens: two and a half blocks

CONFIG = HandoffConfig(reserve_timeout_s=300.0, transfer_timeout_s=60.0, heartbeat_s=5.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeRequest:
    """What a connector may know of a request (`RequestView`), and its block table."""

    ticket: HandoffTicket
    num_prompt_tokens: int
    table: tuple[int, ...] = ()
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    block_hashes: Sequence[BlockHash] = ()
    hash_block_size: int = BLOCK

    @property
    def request_id(self) -> str:
        return str(self.ticket)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_blocks(self) -> int:
        """Of the prompt."""
        return -(-self.num_prompt_tokens // BLOCK)


@dataclass
class FakeStep:
    """What a connector may know of a step (`StepView`)."""

    scheduled: Sequence[FakeRequest] = ()
    preempted: Sequence[FakeRequest] = ()
    num_new: int = 0  # tokens, of each

    @property
    def scheduled_req_ids(self) -> list[str]:
        return [request.request_id for request in self.scheduled]

    @property
    def preempted_req_ids(self) -> list[str]:
        return [request.request_id for request in self.preempted]

    def block_table(self, request_id: str) -> Sequence[int]:
        return self._find(request_id).table

    def computed_before(self, request_id: str) -> int:
        return self._find(request_id).num_computed_tokens

    def computed_after(self, request_id: str) -> int:
        return self.computed_before(request_id) + self.num_new

    def _find(self, request_id: str) -> FakeRequest:
        return next(r for r in self.scheduled if r.request_id == request_id)


def kv_of(ticket: HandoffTicket, number: int) -> NDArray[np.uint8]:
    """What block `number` of a request holds once it is computed, wherever that was."""
    name = ticket.request_id.encode()
    seed = [len(name), *name, number]
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.bytes_per_block, np.uint8)


def check_connector_is_empty(connector: HandoffConnector) -> None:
    """Nothing of any hand-off is left, but for the names of those that are over."""
    assert connector.idle
    assert not connector.has_events
    assert connector.counts().active == 0
    assert connector.next_deadline() is None
    parts = vars(connector._push) | vars(connector._receive)
    queues = {name: value for name, value in parts.items() if isinstance(value, list | dict)}
    del queues["_over"]
    assert set(queues) >= {"sources", "sinks", "sent", "recving", "revoked", "_early", "_reserved"}
    assert not any(queues.values()), queues


class End:
    """One node's connector, and all that it has told so far."""

    def __init__(
        self,
        hub: MemoryHub,
        name: str,
        clock: Clock,
        config: HandoffConfig = CONFIG,
        *,
        layout: BlockLayout = LAYOUT,
        fill: int = 0,
    ) -> None:
        self.clock = clock
        self.pool: GatedPool = make_pool(layout=layout, fill=fill)
        self.transport = MemoryTransport(hub, name, copy=self.pool.copy_extents)
        self.connector = HandoffConnector(self.transport, clock, config)
        self.events: list[HandoffEvent] = []
        self.received: dict[str, tuple[int, ...]] = {}  # finished_recving
        self.sent: list[str] = []  # finished_sending
        self.revoked: list[str] = []  # revoked_recving
        self._activity = threading.Event()
        self.connector.register_kv_caches(self.pool, self._activity.set)

    @property
    def endpoint(self) -> str:
        return self.transport.endpoint

    def close(self) -> None:
        """It dies: nobody is told but by the transport."""
        self.transport.close()
        self.connector._desk.digester.close()

    def poll(self) -> None:
        """What the end of a step does."""
        output = self.connector.get_finished()
        for request_id, tokens in output.finished_recving.items():
            assert request_id not in self.received, "told twice"
            self.received[request_id] = tokens
        assert not set(output.finished_sending) & set(self.sent), "told twice"
        self.sent.extend(output.finished_sending)
        self.revoked.extend(output.revoked_recving)
        self.events.extend(self.connector.take_events())

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll whenever the transport says that it is worth while."""
        while True:
            self._activity.clear()
            self.poll()
            if condition():
                return
            assert self._activity.wait(TIMEOUT_S), (self.connector.sources, self.connector.sinks)

    def told(self, request: FakeRequest) -> list[EventKind]:
        return [event.kind for event in self.events if event.request_id == request.request_id]

    def reasons(self, request: FakeRequest) -> list[Reason | None]:
        """Of the ends that were told."""
        ends = (EventKind.SENT, EventKind.LOST)
        mine = [event for event in self.events if event.request_id == request.request_id]
        return [event.reason for event in mine if event.kind in ends]

    def read(self) -> list[Message]:
        """What has come, instead of the connector, which hears nothing of it."""
        return [decode(received.data) for received in self.transport.receive()]

    def say(self, peer: End, message: Message) -> None:
        """Something that this end would not say by itself now."""
        self.transport.notify(peer.endpoint, encode(message))

    def check_empty(self) -> None:
        """Nothing of any hand-off is left."""
        check_connector_is_empty(self.connector)
        for name in ("_open", "_writing"):
            assert not vars(self.transport)[name], name


class Prefill(End):
    """The scheduler of P, by hand."""

    def add(self, d: End, num_tokens: int = 40, name: str = "r", at: float = 0.0) -> FakeRequest:
        ticket = HandoffTicket(name, 0)
        self.connector.add_source(ticket, d.endpoint, arrival_time=at)
        return FakeRequest(ticket, num_tokens)

    def compute(self, request: FakeRequest, table: Sequence[int], num_tokens: int) -> None:
        """One step: `num_tokens` more tokens, into `table`. What was computed before may travel."""
        request.table = tuple(table)
        self.connector.update_state_after_alloc(request, table, 0)
        step = FakeStep([request], num_new=num_tokens)
        self.connector.start_load_kv(self.connector.build_connector_meta(step))
        request.num_computed_tokens += num_tokens
        for number, block_id in enumerate(table):
            if number * BLOCK < request.num_computed_tokens:
                self.pool.bytes[block_id] = kv_of(request.ticket, number)
        self.poll()

    def preempt(self, request: FakeRequest) -> None:
        """Its blocks are somebody else's in the same step, who overwrites them at once."""
        table, request.table, request.num_computed_tokens = request.table, (), 0
        step = FakeStep([], [request])
        self.connector.start_load_kv(self.connector.build_connector_meta(step))
        self.pool.bytes[list(table)] = 0xBB
        self.poll()

    def finish(
        self, request: FakeRequest, reason: FinishReason = FinishReason.LENGTH, token: int = 7
    ) -> bool:
        """The request ends, with one more token unless something went wrong."""
        if reason in (FinishReason.LENGTH, FinishReason.STOP):
            request.output_token_ids = [token]
        request.finish_reason = reason
        return self.connector.request_finished(request, request.table)

    def prefill(self, request: FakeRequest, table: Sequence[int], token: int = 7) -> None:
        """All of it in one step, up to the first token. Its blocks stay."""
        self.compute(request, table, request.num_prompt_tokens)
        assert self.finish(request, token=token)

    def prefill_again(self, request: FakeRequest, table: Sequence[int], token: int = 7) -> None:
        """The request was asked for once more, because its blocks were given up."""
        request.finish_reason, request.output_token_ids = None, []
        request.num_computed_tokens = 0
        self.prefill(request, table, token)


class Decode(End):
    """The scheduler of D, by hand. Its pool is filled with what no request has."""

    def __init__(
        self,
        hub: MemoryHub,
        clock: Clock,
        config: HandoffConfig = CONFIG,
        *,
        layout: BlockLayout = LAYOUT,
    ) -> None:
        super().__init__(hub, "d", clock, config, layout=layout, fill=0xDD)

    def add(self, p: End, at_p: FakeRequest) -> FakeRequest:
        self.connector.add_sink(at_p.ticket, p.endpoint)
        return FakeRequest(at_p.ticket, at_p.num_prompt_tokens)

    def reserve(self, request: FakeRequest, table: Sequence[int], num_cached: int = 0) -> None:
        """The first `num_cached` tokens are in D's own cache."""
        self.plan_to_reserve(request, table, num_cached)
        self.begin_step()
        self.poll()

    def plan_to_reserve(
        self, request: FakeRequest, table: Sequence[int], num_cached: int = 0
    ) -> None:
        """In a step that has not begun: the one before may still run."""
        found = self.connector.get_num_new_matched_tokens(request, num_cached)
        assert found == (request.num_prompt_tokens - num_cached, True)
        request.table = tuple(table)
        self.connector.update_state_after_alloc(request, table, found[0] or 0)

    def begin_step(self) -> None:
        self.connector.start_load_kv(self.connector.build_connector_meta(FakeStep()))

    def end(self, request: FakeRequest, reason: FinishReason = FinishReason.ABORT) -> None:
        """The request ends here; its blocks are held until they are `received`."""
        request.finish_reason = reason
        assert not self.connector.request_finished(request, request.table)

    def holds_kv_of(self, request: FakeRequest, first_block: int = 0) -> bool:
        return all(
            (self.pool.bytes[block_id] == kv_of(request.ticket, number)).all()
            for number, block_id in enumerate(request.table[: request.num_blocks])
            if number >= first_block
        )

    def is_untouched(self, block_ids: Sequence[int]) -> bool:
        return bool((self.pool.bytes[list(block_ids)] == 0xDD).all())


def lose(kind: type[Message], sender: End, receiver: End) -> None:
    """What `sender` has said arrives, but for this one message."""
    messages = receiver.read()
    assert sum(isinstance(message, kind) for message in messages) == 1, messages
    for message in messages:
        if not isinstance(message, kind):
            sender.say(receiver, message)


def settle(*ends: End) -> None:
    """Let messages be answered. Enough for any exchange of which no write is part."""
    for _ in range(4):
        for end in ends:
            end.poll()


def arrives(p: Prefill, d: Decode, at_d: FakeRequest, tokens: tuple[int, ...] = (7,)) -> None:
    """The hand-off goes on to its good end."""
    p.until(lambda: SENT in p.told(at_d))
    d.until(lambda: COMMITTED in d.told(at_d))
    assert p.reasons(at_d) == [None]
    assert d.received == {at_d.request_id: tokens}
    assert d.holds_kv_of(at_d)


def polled(end: End, clock: Clock, seconds: float) -> None:
    """Time goes by, and the end polls as often as it asks for, but never at once again."""
    until = clock.now + seconds
    for _ in range(1000):
        due = end.connector.next_deadline()
        assert due is None or due > clock.now - 0.01, "it would be polled without end"
        clock.now = min(until, clock.now + 1.0 if due is None else due + 0.01)
        end.poll()
        if clock.now >= until:
            return
    raise AssertionError("it is polled too often")
