"""P is lost before the commit, and D goes on with another one, in the blocks that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from kv_transfer import EventKind, HandoffState, MemoryHub, PeerUnreachable, Reason
from kv_transfer.wire import (
    Closed,
    Commit,
    Heartbeat,
    Message,
    PrefillStarted,
    Pushing,
    Revoked,
)
from protocol import HandoffTicket
from tests.kv_transfer.handoff_ends import (
    BLOCK,
    COMMITTED,
    CONFIG,
    D_TABLE,
    LOST,
    P_TABLE,
    RESERVED,
    Clock,
    Decode,
    FakeRequest,
    Prefill,
    arrives,
    kv_of,
    settle,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")

LATER = HandoffTicket("r", 1)
OTHER_TABLE = (20, 21, 22)


@pytest.fixture
def q(hub: MemoryHub, clock: Clock) -> Iterator[Prefill]:
    """The P that comes next."""
    q = Prefill(hub, "q", clock)
    yield q
    settle(q)
    q.check_empty()
    q.close()


def prefill_at(q: Prefill, d: Decode, at_d: FakeRequest) -> FakeRequest:
    """The next attempt, from its job to its first token; D has been told of it."""
    q.connector.add_source(LATER, d.endpoint, arrival_time=0.0)
    at_q = FakeRequest(LATER, at_d.num_prompt_tokens)
    q.prefill(at_q, P_TABLE, token=9)
    return at_q


def arrives_from(q: Prefill, d: Decode, at_d: FakeRequest) -> None:
    """All of it, into the blocks of D's table, under the name of the first attempt."""
    d.poll()
    q.until(lambda: EventKind.SENT in [event.kind for event in q.events])
    d.until(lambda: COMMITTED in d.told(at_d))
    assert d.received == {at_d.request_id: (9,)}
    assert d.holds_kv_of(at_d)


# ---------------------------------------------------------------------- where it was lost


def before_it_started(p: Prefill, d: Decode, at_p: FakeRequest, at_d: FakeRequest) -> None:
    d.reserve(at_d, D_TABLE)


def while_the_step_is_planned(p: Prefill, d: Decode, at_p: FakeRequest, at_d: FakeRequest) -> None:
    p.compute(at_p, P_TABLE, 16)
    d.poll()
    d.plan_to_reserve(at_d, D_TABLE)


def after_the_destination(p: Prefill, d: Decode, at_p: FakeRequest, at_d: FakeRequest) -> None:
    p.compute(at_p, P_TABLE, 16)
    d.poll()
    d.reserve(at_d, D_TABLE)


def while_it_pushed(p: Prefill, d: Decode, at_p: FakeRequest, at_d: FakeRequest) -> None:
    after_the_destination(p, d, at_p, at_d)
    p.compute(at_p, P_TABLE, 16)
    p.until(lambda: p.connector.counts().blocks > 0)
    d.poll()
    assert d.connector.sinks[at_d.request_id].state is HandoffState.PUSHING


def while_it_is_asked_to_give_way(
    p: Prefill, d: Decode, at_p: FakeRequest, at_d: FakeRequest
) -> None:
    after_the_destination(p, d, at_p, at_d)
    assert d.connector.revoke_reservation(at_d.request_id)


def with_damage(p: Prefill, d: Decode, at_p: FakeRequest, at_d: FakeRequest) -> None:
    p.prefill(at_p, P_TABLE)
    d.poll()
    d.reserve(at_d, D_TABLE)
    p.until(lambda: EventKind.SENT in p.told(at_p))
    d.pool.bytes[D_TABLE[1]] ^= 1
    d.until(lambda: LOST in d.told(at_d))
    assert d.reasons(at_d) == [Reason.CHECKSUM]


WHERE: list[Callable[[Prefill, Decode, FakeRequest, FakeRequest], None]] = [
    before_it_started,
    while_the_step_is_planned,
    after_the_destination,
    while_it_pushed,
    while_it_is_asked_to_give_way,
    with_damage,
]


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("where", WHERE)
def test_another_p_writes_into_the_same_blocks(
    p: Prefill,
    q: Prefill,
    d: Decode,
    where: Callable[[Prefill, Decode, FakeRequest, FakeRequest], None],
    noticed: bool,
) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    where(p, d, at_p, at_d)
    if noticed:
        p.connector.abandon_source(at_p.request_id)
        settle(p, d)
    assert d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    p.connector.abandon_source(at_p.request_id)
    sink = d.connector.sinks[at_d.request_id]
    assert (sink.ticket, sink.peer, sink.state) == (LATER, q.endpoint, HandoffState.READY)
    assert sink.block_ids == D_TABLE
    assert d.connector.counts().retargeted == {"kept": 1}
    settle(p, d)  # what the first one says late
    assert not sink.started
    prefill_at(q, d, at_d)
    d.begin_step()
    arrives_from(q, d, at_d)
    assert d.told(at_d).count(RESERVED) == (where is not while_the_step_is_planned)
    assert d.revoked == []
    counts = d.connector.counts()
    assert (counts.committed, counts.aborted + counts.failed) == (1, 1)


def test_d_has_a_part_of_the_prompt(p: Prefill, q: Prefill, d: Decode) -> None:
    """Its own hits are still there, and are not sent."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 16)
    d.poll()
    d.pool.bytes[D_TABLE[0]] = kv_of(at_p.ticket, 0)
    d.reserve(at_d, D_TABLE, num_cached=BLOCK)
    p.connector.abandon_source(at_p.request_id)
    settle(p, d)
    assert d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    prefill_at(q, d, at_d)
    d.begin_step()
    arrives_from(q, d, at_d)
    assert q.connector.counts().blocks == 2


def test_it_waits_for_blocks_and_keeps_its_place(p: Prefill, q: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 16)
    d.poll()
    p.connector.abandon_source(at_p.request_id)
    settle(p, d)
    assert d.connector.get_num_new_matched_tokens(at_d, 0) == (None, False)  # nobody to ask
    assert d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    assert d.connector.counts().retargeted == {"queued": 1}
    prefill_at(q, d, at_d)
    d.poll()
    d.reserve(at_d, D_TABLE)
    arrives_from(q, d, at_d)


def test_the_next_p_is_faster_than_its_job(p: Prefill, q: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    after_the_destination(p, d, at_p, at_d)
    p.connector.abandon_source(at_p.request_id)
    prefill_at(q, d, at_d)
    settle(p, d)
    assert d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    assert d.connector.sinks[at_d.request_id].started
    d.begin_step()
    arrives_from(q, d, at_d)


def test_one_after_the_other_is_lost(p: Prefill, q: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    while_it_pushed(p, d, at_p, at_d)
    for attempt in range(1, 6):
        peer = (p, q)[attempt % 2]
        assert d.connector.retarget_sink(
            at_d.request_id, HandoffTicket("r", attempt), peer.endpoint
        )
        d.begin_step()
        settle(p, q, d)
    assert d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    p.connector.abandon_source(at_p.request_id)
    prefill_at(q, d, at_d)
    d.begin_step()
    arrives_from(q, d, at_d)
    assert d.connector.counts().retargeted == {"kept": 6}


# ---------------------------------------------------------------------- no proof


def test_without_proof_the_blocks_are_in_quarantine(p: Prefill, q: Prefill, d: Decode) -> None:
    """A write is under way: D has no right to these blocks before it has ended."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.poll()
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[1])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    d.poll()
    assert not d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    assert d.connector.counts().retargeted == {"given_up": 1}
    d.end(at_d)
    d.poll()
    assert d.received == {}
    gate.open()
    d.until(lambda: d.received == {at_d.request_id: ()})
    p.until(lambda: EventKind.SENT in p.told(at_p))


def test_there_is_nothing_to_retarget(p: Prefill, q: Prefill, d: Decode) -> None:
    assert not d.connector.retarget_sink("r/0", LATER, q.endpoint)
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.poll()
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    assert not d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    assert d.connector.counts().retargeted == {}


def test_a_p_that_cannot_be_reached_changes_nothing(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    after_the_destination(p, d, at_p, at_d)
    with pytest.raises(PeerUnreachable):
        d.connector.retarget_sink(at_d.request_id, LATER, "tcp:nowhere")
    p.compute(at_p, P_TABLE, 24)
    p.finish(at_p)
    arrives(p, d, at_d)


# ---------------------------------------------------------------------- while it waits


def kept(p: Prefill, d: Decode) -> FakeRequest:
    """P is lost, D has its blocks and nobody who writes to them."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    while_it_pushed(p, d, at_p, at_d)
    p.connector.abandon_source(at_p.request_id)
    settle(p, d)
    assert d.told(at_d)[-1] is LOST
    return at_d


def test_the_blocks_are_not_kept_for_ever(p: Prefill, d: Decode, clock: Clock) -> None:
    at_d = kept(p, d)
    clock.advance(CONFIG.transfer_timeout_s - 0.1)
    d.poll()
    assert d.told(at_d)[-1] is LOST
    clock.advance(0.2)
    for _ in range(3):
        d.poll()
    assert d.told(at_d)[-2:] == [LOST, EventKind.LAPSED]  # once
    d.end(at_d)
    d.poll()
    assert d.received == {at_d.request_id: ()}


def test_an_older_request_may_have_the_blocks_meanwhile(p: Prefill, q: Prefill, d: Decode) -> None:
    at_d = kept(p, d)
    assert d.connector.revoke_reservation(at_d.request_id)
    d.poll()
    assert d.revoked == [at_d.request_id]
    assert not d.connector.revoke_reservation(at_d.request_id)
    assert d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    assert d.connector.counts().retargeted == {"queued": 1}
    prefill_at(q, d, at_d)
    d.poll()
    d.reserve(at_d, OTHER_TABLE)
    arrives_from(q, d, at_d)


def test_the_request_ends_meanwhile(p: Prefill, q: Prefill, d: Decode) -> None:
    at_d = kept(p, d)
    d.end(at_d)
    assert not d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    d.poll()
    assert d.received == {at_d.request_id: ()}


LATE: list[Message] = [
    PrefillStarted(HandoffTicket("r", 0)),
    Pushing(HandoffTicket("r", 0)),
    Heartbeat(HandoffTicket("r", 0)),
    Commit(HandoffTicket("r", 0), 40, (7,), (1, 2, 3)),
    Closed(HandoffTicket("r", 0), Reason.CANCELLED),
    Revoked(HandoffTicket("r", 0), 1),
]


@pytest.mark.parametrize("late", LATE, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("as_if_new", [False, True])
def test_late_words_of_the_old_p_are_harmless(
    p: Prefill, q: Prefill, d: Decode, late: Message, as_if_new: bool
) -> None:
    """Also if it speaks of the new hand-off, which is none of its business."""
    at_d = kept(p, d)
    assert d.connector.retarget_sink(at_d.request_id, LATER, q.endpoint)
    d.begin_step()
    before = vars(d.connector.sinks[at_d.request_id]).copy()
    message = msgspec.structs.replace(late, ticket=LATER) if as_if_new else late
    p.say(d, message)
    d.poll()
    assert vars(d.connector.sinks[at_d.request_id]) == before
    prefill_at(q, d, at_d)
    arrives_from(q, d, at_d)
