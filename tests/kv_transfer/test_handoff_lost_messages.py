"""Messages that get lost, one by one; and those of somebody who has no part in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer import HandoffState, MemoryHub, Reason
from kv_transfer.wire import (
    Arrived,
    Cancel,
    Closed,
    Commit,
    Destination,
    Heartbeat,
    Message,
    PrefillStarted,
    Pushing,
    Revoke,
    Revoked,
)
from protocol import FinishReason
from tests.kv_transfer.handoff_ends import (
    COMMITTED,
    CONFIG,
    D_TABLE,
    P_TABLE,
    RESERVED,
    SENT,
    STARTED,
    Clock,
    Decode,
    End,
    Prefill,
    arrives,
    lose,
    polled,
    settle,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_lost_start(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    lose(PrefillStarted, p, d)
    settle(p, d)
    assert d.told(at_d) == []
    clock.advance(CONFIG.heartbeat_s + 0.1)
    settle(p, d)
    assert d.told(at_d) == [STARTED]
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)


def test_a_lost_destination(p: Prefill, d: Decode, clock: Clock) -> None:
    """P starts once more, as far as D can tell, and D answers once more."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.poll()
    d.reserve(at_d, D_TABLE)
    lose(Destination, d, p)
    settle(p, d)
    assert p.told(at_p) == []
    clock.advance(CONFIG.heartbeat_s + 0.1)
    settle(p, d)
    arrives(p, d, at_d)
    assert d.told(at_d) == [STARTED, RESERVED, COMMITTED]


def test_the_lost_news_that_the_push_begins(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[0])
    p.compute(at_p, P_TABLE, 8)
    gate.wait_until_reached()
    lose(Pushing, p, d)
    d.poll()
    assert d.connector.sinks[at_d.request_id].state is HandoffState.READY
    gate.open()
    p.finish(at_p)
    arrives(p, d, at_d)


def test_a_lost_commit(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))  # P's scheduler has its blocks back already
    lose(Commit, p, d)
    settle(d, p)
    assert COMMITTED not in d.told(at_d)
    assert p.connector.counts().active == 1
    clock.advance(CONFIG.heartbeat_s + 0.1)
    p.poll()
    arrives(p, d, at_d)


def test_a_commit_that_is_never_answered(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    polled(p, clock, CONFIG.transfer_timeout_s - 1)
    assert not p.connector.idle
    polled(p, clock, 2)
    assert p.connector.idle
    commits = [message for message in d.read() if isinstance(message, Commit)]
    assert len(commits) > 3
    for commit in commits:
        p.say(d, commit)
    arrives(p, d, at_d)  # once


def test_a_lost_confirmation(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    lose(Arrived, d, p)
    settle(p, d)
    assert p.connector.counts().active == 1
    clock.advance(CONFIG.heartbeat_s + 0.1)
    settle(p, d)
    assert p.connector.counts().active == 0
    assert d.told(at_d).count(COMMITTED) == 1


def test_a_lost_end(p: Prefill, d: Decode, clock: Clock) -> None:
    """P has forgotten it, so D hears no more signs of life."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 20)
    d.poll()
    d.reserve(at_d, D_TABLE)
    p.finish(at_p, FinishReason.ABORT)
    p.poll()
    lose(Closed, p, d)
    polled(d, clock, CONFIG.transfer_timeout_s + 1)
    assert d.reasons(at_d) == [Reason.DEADLINE]
    assert p.read() == [Cancel(at_d.ticket, Reason.DEADLINE)]
    d.end(at_d)
    d.poll()
    assert d.received == {at_d.request_id: ()}


def test_a_lost_cancel_is_repeated_as_long_as_p_may_write(
    p: Prefill, d: Decode, clock: Clock
) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[1])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    d.end(at_d)
    d.poll()
    lose(Cancel, d, p)
    p.poll()
    assert p.connector.sources[at_p.request_id].state is HandoffState.PUSHING
    polled(d, clock, CONFIG.heartbeat_s + 0.1)
    p.poll()
    assert p.connector.sources[at_p.request_id].state is HandoffState.ABORTED
    gate.open()
    p.until(lambda: SENT in p.told(at_p))
    d.until(lambda: d.received == {at_d.request_id: ()})
    clock.advance(CONFIG.heartbeat_s + 0.1)
    settle(d, p)
    assert p.read() == []  # the answer came, so nobody asks any more


def test_a_start_that_comes_after_the_end(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    p.say(d, PrefillStarted(at_p.ticket))
    settle(d, p)
    assert d.connector.idle  # else it would be kept for a job that came and went


# ---------------------------------------------------------------------- somebody else


@pytest.fixture
def x(hub: MemoryHub, clock: Clock) -> Iterator[End]:
    end = End(hub, "x", clock)
    yield end
    end.close()


def test_what_others_say_of_it_does_not_count(p: Prefill, d: Decode, x: End) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    ticket = at_p.ticket
    lies_to_d: tuple[Message, ...] = (
        PrefillStarted(ticket),
        Pushing(ticket),
        Commit(ticket, 40, (8,), ()),
        Revoked(ticket, 1),
        Closed(ticket, Reason.CANCELLED),
    )
    lies_to_p: tuple[Message, ...] = (
        Destination(ticket, 1, 0, (1, 2, 3)),
        Arrived(ticket),
        Revoke(ticket, 9),
        Cancel(ticket, Reason.CANCELLED),
    )

    def lie() -> None:
        for message in lies_to_d:
            x.say(d, message)
        for message in lies_to_p:
            x.say(p, message)
        settle(p, d)

    lie()
    assert d.told(at_d) == []
    p.compute(at_p, P_TABLE, 10)
    d.poll()
    lie()
    d.reserve(at_d, D_TABLE)
    d.connector.revoke_reservation(at_d.request_id)
    d.connector.poll()
    for message in lies_to_d:
        x.say(d, message)
    d.poll()
    assert d.revoked == []
    settle(p, d)
    assert d.revoked == [at_d.request_id]
    d.reserve(at_d, D_TABLE)
    p.compute(at_p, P_TABLE, 30)
    p.finish(at_p)
    lie()
    arrives(p, d, at_d)
    lie()


def test_nobody_else_can_confirm_a_commit(p: Prefill, d: Decode, x: End, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    lose(Commit, p, d)
    x.say(p, Arrived(at_p.ticket))
    x.say(p, Heartbeat(at_p.ticket))
    clock.advance(CONFIG.heartbeat_s + 0.1)
    p.poll()
    arrives(p, d, at_d)


def test_an_early_start_of_somebody_else(p: Prefill, d: Decode, x: End) -> None:
    at_p = p.add(d)
    x.say(d, PrefillStarted(at_p.ticket))
    d.poll()
    assert not d.connector.add_sink(at_p.ticket, p.endpoint)
    d.connector.drop_sink(at_p.request_id, Reason.CANCELLED)
    p.connector.abandon_source(at_p.request_id)
