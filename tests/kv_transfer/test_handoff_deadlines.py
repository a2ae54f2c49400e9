"""How long the two ends wait for each other."""

from __future__ import annotations

import pytest

from kv_transfer import HandoffState, Reason
from kv_transfer.wire import Cancel
from protocol import FinishReason, HandoffTicket, TransferCounts
from tests.kv_transfer.handoff_ends import (
    CONFIG,
    D_TABLE,
    P_TABLE,
    SENT,
    Clock,
    Decode,
    FakeRequest,
    Prefill,
    arrives,
    polled,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_p_waits_for_d_to_reserve_but_not_for_ever(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    polled(p, clock, CONFIG.reserve_timeout_s - 1)
    assert p.reasons(at_p) == []
    polled(p, clock, 2)
    assert p.reasons(at_p) == [Reason.DEADLINE]
    assert p.sent == [at_p.request_id]
    assert p.connector.counts() == TransferCounts(expired=1, reasons={"deadline": 1})
    d.poll()
    assert d.reasons(at_d) == [Reason.DEADLINE]
    d.end(at_d)


def test_a_queue_on_p_may_be_long(p: Prefill, d: Decode, clock: Clock) -> None:
    """Nothing is computed yet: D holds no blocks, and P's own queue is nobody's fault."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    for _ in range(int(3 * CONFIG.reserve_timeout_s)):
        polled(p, clock, 1)
        d.poll()
    assert (p.reasons(at_p), d.reasons(at_d)) == ([], [])
    p.prefill(at_p, P_TABLE)
    d.poll()
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)


def test_d_waits_for_p_to_start_but_not_for_ever(p: Prefill, d: Decode, clock: Clock) -> None:
    at_d = FakeRequest(HandoffTicket("r", 0), 40)
    d.connector.add_sink(at_d.ticket, p.endpoint)
    polled(d, clock, CONFIG.reserve_timeout_s - 1)
    assert d.reasons(at_d) == []
    polled(d, clock, 2)
    assert d.reasons(at_d) == [Reason.DEADLINE]
    assert p.read() == [Cancel(at_d.ticket, Reason.DEADLINE)]
    d.connector.drop_sink(at_d.request_id, Reason.CANCELLED)
    assert d.connector.counts() == TransferCounts(expired=1, reasons={"deadline": 1})


def test_d_holds_blocks_only_while_p_lives(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 20)
    d.poll()
    d.reserve(at_d, D_TABLE)
    polled(d, clock, CONFIG.transfer_timeout_s - 1)
    assert d.reasons(at_d) == []
    polled(d, clock, 2)
    assert d.reasons(at_d) == [Reason.DEADLINE]
    d.end(at_d)
    d.poll()
    assert d.received == {at_d.request_id: ()}
    p.poll()  # it was only slow, and hears that nobody waits any more
    p.until(lambda: SENT in p.told(at_p))
    assert p.reasons(at_p) == [Reason.PEER_CANCELLED]


def test_signs_of_life_renew_the_patience_of_d(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 20)
    d.poll()
    d.reserve(at_d, D_TABLE)
    began = clock.now
    while clock.now < began + 10 * CONFIG.transfer_timeout_s:
        polled(p, clock, CONFIG.heartbeat_s)
        d.poll()
    assert d.reasons(at_d) == []
    polled(d, clock, CONFIG.transfer_timeout_s + 1)
    assert d.reasons(at_d) == [Reason.DEADLINE]
    d.end(at_d)
    p.connector.abandon_source(at_p.request_id)


def test_blocks_that_may_still_be_written_are_in_quarantine(
    p: Prefill, d: Decode, clock: Clock
) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[1])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    d.poll()  # hears that the push began
    polled(d, clock, CONFIG.transfer_timeout_s + 1)
    assert d.reasons(at_d) == [Reason.DEADLINE]
    d.end(at_d)
    polled(d, clock, 10 * CONFIG.transfer_timeout_s)
    assert d.received == {}
    gate.open()
    d.until(lambda: d.received == {at_d.request_id: ()})
    p.until(lambda: SENT in p.told(at_p))


def test_a_push_that_hangs(p: Prefill, d: Decode, clock: Clock) -> None:
    """P gives up, but neither end lets go of blocks that are being copied."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    gate = p.pool.gate(P_TABLE[2])
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.poll()
    gate.wait_until_reached()
    polled(p, clock, CONFIG.transfer_timeout_s - 1)
    assert p.connector.sources[at_p.request_id].state is HandoffState.PUSHING
    polled(p, clock, 2)
    assert p.connector.sources[at_p.request_id].state is HandoffState.EXPIRED
    assert p.sent == []
    # D hears no more of P, or else it would wait as long as the write hangs.
    d.poll()
    for _ in range(20):
        polled(p, clock, CONFIG.transfer_timeout_s / 10)
        d.poll()
    assert d.reasons(at_d) == [Reason.DEADLINE]
    d.end(at_d)
    d.poll()
    assert d.received == {}
    gate.open()
    p.until(lambda: p.sent == [at_p.request_id])
    assert p.reasons(at_p) == [Reason.DEADLINE]
    d.until(lambda: d.received == {at_d.request_id: ()})
    assert p.connector.counts().expired == d.connector.counts().expired == 1


def test_a_push_that_hangs_and_is_wanted_no_more(p: Prefill, d: Decode, clock: Clock) -> None:
    """P cannot say Closed before the write has ended, but it must not keep D waiting either."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[1])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    assert p.finish(at_p, FinishReason.ABORT)
    for _ in range(20):
        polled(p, clock, CONFIG.transfer_timeout_s / 10)
        d.poll()
    assert d.reasons(at_d) == [Reason.DEADLINE]
    d.end(at_d)
    d.poll()
    assert d.received == {}
    gate.open()
    p.until(lambda: p.sent == [at_p.request_id])
    d.until(lambda: d.received == {at_d.request_id: ()})


def test_a_push_has_its_time_after_a_late_destination(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    gate = p.pool.gate(P_TABLE[2])
    p.prefill(at_p, P_TABLE)
    polled(p, clock, CONFIG.reserve_timeout_s - 1)
    d.reserve(at_d, D_TABLE)
    p.poll()
    gate.wait_until_reached()
    for _ in range(10):
        polled(p, clock, CONFIG.transfer_timeout_s / 11)
        d.poll()
    gate.open()
    arrives(p, d, at_d)
