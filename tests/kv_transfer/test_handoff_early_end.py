"""A request ends early, or one of the two nodes does."""

from __future__ import annotations

import pytest

from kv_transfer import MemoryHub, Reason
from kv_transfer.wire import Destination
from protocol import FinishReason, HandoffTicket, TransferCounts
from tests.kv_transfer.handoff_ends import (
    CONFIG,
    D_TABLE,
    LOST,
    P_TABLE,
    SENT,
    STARTED,
    Clock,
    Decode,
    End,
    FakeRequest,
    Prefill,
    arrives,
    settle,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# ---------------------------------------------------------------------- the request ends early


@pytest.mark.parametrize("reserved", [False, True])
def test_the_first_token_ends_the_request(p: Prefill, d: Decode, reserved: bool) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 40)
    d.poll()
    if reserved:
        d.reserve(at_d, D_TABLE)
    assert not p.finish(at_p, FinishReason.STOP)
    p.until(lambda: SENT in p.told(at_p))
    d.poll()
    assert p.reasons(at_p) == d.reasons(at_d) == [Reason.ENDED_BY_FIRST_TOKEN]
    assert p.sent == []
    d.end(at_d)
    d.poll()
    assert d.received == ({at_d.request_id: ()} if reserved else {})
    assert p.connector.counts().aborted == d.connector.counts().aborted == 1


@pytest.mark.parametrize(
    ("how", "reason"),
    [(FinishReason.ERROR, Reason.PREFILL_FAILED), (FinishReason.ABORT, Reason.CANCELLED)],
)
@pytest.mark.parametrize("num_computed", [0, 20])
def test_p_gives_up_while_it_computes(
    p: Prefill, d: Decode, how: FinishReason, reason: Reason, num_computed: int
) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    if num_computed:
        p.compute(at_p, P_TABLE, num_computed)
        d.poll()
        d.reserve(at_d, D_TABLE)
    assert not p.finish(at_p, how)
    settle(p, d)
    assert p.reasons(at_p) == d.reasons(at_d) == [reason]
    assert d.received == {}
    d.end(at_d)
    d.poll()
    assert d.received == ({at_d.request_id: ()} if num_computed else {})


def test_p_gives_up_while_it_pushes(p: Prefill, d: Decode) -> None:
    """Both keep their blocks until the write has ended."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[1])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    assert p.finish(at_p, FinishReason.ABORT)  # the scheduler must keep its blocks
    d.end(at_d)
    settle(p, d)
    assert p.sent == []
    assert d.received == {}
    gate.open()
    p.until(lambda: p.sent == [at_p.request_id])
    d.poll()
    assert d.received == {at_d.request_id: ()}


def test_p_gives_up_what_it_has_computed(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    p.connector.abandon_source(at_p.request_id)
    p.connector.abandon_source("unknown/0")
    settle(p, d)
    assert p.sent == [at_p.request_id]
    assert d.reasons(at_d) == [Reason.CANCELLED]
    d.end(at_d)


def test_d_gives_up_before_it_reserves(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.poll()
    d.connector.drop_sink(at_d.request_id, Reason.CANCELLED)
    settle(d, p)
    assert p.reasons(at_p) == [Reason.PEER_CANCELLED]
    assert p.sent == [at_p.request_id]
    assert d.told(at_d) == [STARTED]  # whoever drops it knows
    assert d.connector.counts() == TransferCounts(aborted=1, reasons={"cancelled": 1})


def test_d_gives_up_before_p_has_heard_of_the_request(p: Prefill, d: Decode, clock: Clock) -> None:
    ticket = HandoffTicket("r", 0)
    d.connector.add_sink(ticket, p.endpoint)
    d.connector.drop_sink(str(ticket), Reason.CANCELLED)
    settle(d, p, d)
    at_p = p.add(d)
    p.prefill(at_p, P_TABLE)
    settle(p, d)
    clock.advance(CONFIG.transfer_timeout_s + 1)
    settle(p, d)
    assert len(p.reasons(at_p)) == 1


@pytest.mark.parametrize("pushing", [False, True])
def test_d_gives_up_what_it_has_reserved(p: Prefill, d: Decode, pushing: bool) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[1])
    if pushing:
        p.compute(at_p, P_TABLE, 4)
        gate.wait_until_reached()
    d.end(at_d)
    d.poll()
    p.poll()
    assert (d.received == {}) == pushing  # the transport gave proof, if there was nothing to prove
    gate.open()
    p.until(lambda: SENT in p.told(at_p))
    d.until(lambda: d.received == {at_d.request_id: ()})
    assert p.reasons(at_p) == [Reason.PEER_CANCELLED]
    assert LOST not in d.told(at_d)  # whoever ended it knows


def test_both_give_up_at_once(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 20)
    d.reserve(at_d, D_TABLE)
    p.finish(at_p, FinishReason.ABORT)
    d.end(at_d)
    p.connector.poll()
    d.connector.poll()  # Closed and Cancel have crossed each other
    settle(p, d)
    assert p.reasons(at_p) == [Reason.CANCELLED]
    assert d.reasons(at_d) == []
    assert d.received == {at_d.request_id: ()}
    assert list(p.transport.receive()) == list(d.transport.receive()) == []


def test_d_gives_up_while_the_commit_is_on_its_way(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    d.end(at_d)
    d.poll()
    settle(p, d)
    assert d.received == {at_d.request_id: ()}
    assert p.reasons(at_p) == [None]
    assert d.connector.counts() == TransferCounts(aborted=1, reasons={"cancelled": 1})


# ---------------------------------------------------------------------- a peer is gone


def test_d_is_gone_when_p_says_something(p: Prefill, hub: MemoryHub, clock: Clock) -> None:
    d = End(hub, "gone", clock)
    requests = [p.add(d, name=name) for name in "ab"]
    d.close()
    p.compute(requests[0], P_TABLE, 20)
    p.poll()
    assert [p.reasons(request) for request in requests] == [[Reason.PEER_LOST]] * 2


def test_d_is_gone_when_p_pushes(p: Prefill, hub: MemoryHub, clock: Clock) -> None:
    gone = End(hub, "gone", clock, fill=0xDD)
    at_p = p.add(gone)
    p.prefill(at_p, P_TABLE)
    gone.say(p, Destination(at_p.ticket, 1, 0, D_TABLE))
    gone.close()
    p.until(lambda: SENT in p.told(at_p))
    assert p.reasons(at_p)[0] in (Reason.WRITE_FAILED, Reason.PEER_LOST)
    assert p.sent == [at_p.request_id]
    assert p.connector.counts().failed == 1


def test_p_is_gone_when_d_says_something(d: Decode, hub: MemoryHub, clock: Clock) -> None:
    p = Prefill(hub, "gone", clock)
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    other = d.add(p, FakeRequest(HandoffTicket("other", 0), 20))
    p.compute(at_p, P_TABLE, 20)
    d.poll()
    p.close()
    d.reserve(at_d, D_TABLE)
    d.poll()
    assert d.reasons(at_d) == d.reasons(other) == [Reason.PEER_LOST]
    for request in (at_d, other):
        d.end(request)
    d.poll()
    assert d.received == {at_d.request_id: ()}
    assert d.connector.counts() == TransferCounts(failed=2, reasons={"peer_lost": 2})


def test_the_others_go_on_when_one_peer_is_gone(
    p: Prefill, d: Decode, hub: MemoryHub, clock: Clock
) -> None:
    gone = End(hub, "gone", clock)
    lost = p.add(gone, name="lost")
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    gone.close()
    p.compute(lost, (20, 21), 20)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    assert p.reasons(lost) == [Reason.PEER_LOST]


def test_p_tells_d_that_it_stops(d: Decode, hub: MemoryHub, clock: Clock) -> None:
    p = Prefill(hub, "stopping", clock)
    requests = {name: p.add(d, name=name) for name in ("queued", "computing", "pinned", "reserved")}
    at_d = {name: d.add(p, request) for name, request in requests.items()}
    p.compute(requests["computing"], (1, 2), 20)
    p.prefill(requests["pinned"], (3, 4, 5))
    p.compute(requests["reserved"], (6, 7, 8), 20)
    d.reserve(at_d["reserved"], D_TABLE)
    p.connector.shutdown()
    d.poll()
    for request in at_d.values():
        assert d.reasons(request) == [Reason.CANCELLED]
    for request in at_d.values():
        d.end(request)
    d.poll()
    assert d.received == {"reserved/0": ()}


def test_d_tells_p_that_it_stops(p: Prefill, hub: MemoryHub, clock: Clock) -> None:
    d = End(hub, "stopping", clock)
    requests = [p.add(d, name=name) for name in ("queued", "computing", "pinned")]
    for request in requests:
        d.connector.add_sink(request.ticket, p.endpoint)
    p.compute(requests[1], (1, 2), 20)
    p.prefill(requests[2], (3, 4, 5))
    d.connector.shutdown()
    settle(p)
    assert [p.reasons(request) for request in requests] == [[Reason.PEER_CANCELLED]] * 3


def test_a_shutdown_waits_for_writes_both_ways(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.poll()  # the write begins
    d.connector.shutdown()
    before = d.pool.bytes.copy()
    p.until(lambda: SENT in p.told(at_p))
    assert (d.pool.bytes == before).all()
    d.connector.sinks.clear()
    d.connector._receive._by_ticket.clear()
    d.connector._desk.flush()
