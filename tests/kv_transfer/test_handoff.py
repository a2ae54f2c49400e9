"""The ordinary way of a request from P to D, whoever hears of it first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer import Extents, HandoffConfig, MemoryHub, Reason, WriteState
from kv_transfer.wire import Commit
from protocol import HandoffTicket, TransferCounts
from tests.kv_transfer.handoff_ends import (
    COMMITTED,
    CONFIG,
    D_TABLE,
    P_TABLE,
    PUSHED,
    RESERVED,
    SENT,
    STARTED,
    Clock,
    Decode,
    End,
    FakeRequest,
    Prefill,
    arrives,
    kv_of,
    polled,
    settle,
)
from tests.kv_transfer.pools import LAYOUT

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# ---------------------------------------------------------------------- the ordinary way


def test_blocks_travel_while_the_next_chunk_is_computed(p: Prefill, d: Decode) -> None:
    at_p = p.add(d, 40)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE[:1], 16)
    d.poll()
    assert d.told(at_d) == [STARTED]
    d.reserve(at_d, D_TABLE)
    assert d.told(at_d) == [STARTED, RESERVED]
    p.poll()
    assert p.told(at_p) == []  # the first block is computed, but only the next step says so
    p.compute(at_p, P_TABLE[:2], 16)
    p.until(lambda: p.told(at_p) == [PUSHED])
    assert (d.pool.bytes[D_TABLE[0]] == kv_of(at_p.ticket, 0)).all()
    assert d.is_untouched(D_TABLE[1:])
    p.compute(at_p, P_TABLE, 8)
    assert p.finish(at_p)
    p.until(lambda: SENT in p.told(at_p))
    assert set(p.told(at_p)[:-1]) == {PUSHED}
    assert p.sent == [at_p.request_id]
    assert d.received == {}
    d.until(lambda: COMMITTED in d.told(at_d))
    p.poll()
    assert d.told(at_d) == [STARTED, RESERVED, COMMITTED]
    assert d.received == {at_d.request_id: (7,)}
    assert d.holds_kv_of(at_d)
    size = LAYOUT.bytes_per_block
    assert p.connector.counts() == TransferCounts(committed=1, blocks=3, bytes=3 * size)
    assert d.connector.counts() == TransferCounts(committed=1)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 300])
def test_a_destination_that_comes_after_all_is_computed(
    p: Prefill, d: Decode, num_tokens: int
) -> None:
    at_p = p.add(d, num_tokens)
    at_d = d.add(p, at_p)
    p.prefill(at_p, range(1, at_p.num_blocks + 1))
    settle(p, d)
    assert (p.told(at_p), d.told(at_d)) == ([], [STARTED])
    d.reserve(at_d, range(32, 32 - at_d.num_blocks, -1))
    arrives(p, d, at_d)
    assert p.connector.counts().blocks == at_p.num_blocks
    assert d.is_untouched(range(1, 32 - at_d.num_blocks))


def test_what_d_has_does_not_travel(p: Prefill, d: Decode) -> None:
    at_p = p.add(d, 40)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 40)
    d.reserve(at_d, D_TABLE, num_cached=32)
    p.finish(at_p)
    p.until(lambda: SENT in p.told(at_p))
    d.until(lambda: d.received == {at_d.request_id: (7,)})
    assert d.holds_kv_of(at_d, first_block=2)
    assert d.is_untouched(D_TABLE[:2])
    assert p.connector.counts().blocks == 1


def test_requests_that_travel_together_do_not_mix(p: Prefill, d: Decode) -> None:
    pairs = []
    for number in range(8):
        at_p = p.add(d, 40, name=f"r{number}")
        pairs.append((at_p, d.add(p, at_p)))
        p.compute(at_p, range(4 * number + 1, 4 * number + 4), 20)
    for number, (_, at_d) in enumerate(reversed(pairs)):
        d.reserve(at_d, range(4 * number + 1, 4 * number + 4))
    for number, (at_p, _) in enumerate(pairs):
        p.compute(at_p, at_p.table, 20)
        p.finish(at_p, token=number)
    p.until(lambda: len(p.sent) == 8)
    d.until(lambda: len(d.received) == 8)
    assert d.received == {at_d.request_id: (n,) for n, (_, at_d) in enumerate(pairs)}
    assert all(d.holds_kv_of(at_d) for _, at_d in pairs)


def test_checksums_can_be_off(hub: MemoryHub, clock: Clock, d: Decode) -> None:
    p = Prefill(hub, "p2", clock, replace(CONFIG, checksums=False))
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    (commit,) = [m for m in d.read() if isinstance(m, Commit)]
    assert commit.checksums == ()
    p.say(d, commit)
    arrives(p, d, at_d)
    p.close()


def test_nothing_lands_under_a_ticket_that_is_over(p: Prefill, d: Decode) -> None:
    """D's blocks are the request's own now; even P may not write to them again."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    late = p.transport.write(d.endpoint, at_p.ticket, _one_block(P_TABLE[0], D_TABLE[0]))
    p.until(lambda: late.state is not WriteState.PENDING)
    assert late.state is WriteState.FAILED


def _one_block(ours: int, theirs: int) -> Extents:
    return Extents.of_blocks([(ours, theirs)], LAYOUT.bytes_per_block)


def test_half_a_block_does_not_travel(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 24)
    d.reserve(at_d, D_TABLE)
    p.compute(at_p, P_TABLE, 4)
    p.until(lambda: PUSHED in p.told(at_p))
    p.poll()
    assert not p.connector.sources[at_p.request_id].writing
    assert (d.pool.bytes[D_TABLE[0]] == kv_of(at_p.ticket, 0)).all()
    assert d.is_untouched(D_TABLE[1:])
    p.compute(at_p, P_TABLE, 12)
    p.finish(at_p)
    arrives(p, d, at_d)


# ---------------------------------------------------------------------- who hears of it first


def test_a_start_may_come_before_the_job(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    p.compute(at_p, P_TABLE, 20)
    d.poll()
    assert not d.connector.idle
    assert d.connector.add_sink(at_p.ticket, p.endpoint)
    at_d = FakeRequest(at_p.ticket, 40)
    d.reserve(at_d, D_TABLE)
    p.compute(at_p, P_TABLE, 20)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_d_may_reserve_before_p_has_heard_of_the_request(p: Prefill, d: Decode) -> None:
    """Both get their jobs at the same time, and P may be in the middle of a long step."""
    at_d = FakeRequest(HandoffTicket("r", 0), 40)
    assert not d.connector.add_sink(at_d.ticket, p.endpoint)
    d.reserve(at_d, D_TABLE)
    settle(p, d)
    assert d.told(at_d) == [RESERVED]
    at_p = p.add(d)
    p.prefill(at_p, P_TABLE)
    d.until(lambda: STARTED in d.told(at_d))
    arrives(p, d, at_d)


def test_a_start_of_a_request_that_nobody_asks_for(p: Prefill, d: Decode, clock: Clock) -> None:
    """P waits as long as for any reservation, and D remembers it as long as P says so."""
    at_p = p.add(d)
    p.prefill(at_p, P_TABLE)
    until = clock.now + CONFIG.reserve_timeout_s
    while clock.now < until - CONFIG.heartbeat_s:
        polled(p, clock, CONFIG.heartbeat_s)
        d.poll()
    assert p.reasons(at_p) == []
    polled(p, clock, 2 * CONFIG.heartbeat_s)
    assert p.reasons(at_p) == [Reason.DEADLINE]
    assert p.sent == [at_p.request_id]
    d.poll()
    assert not d.connector.idle
    polled(d, clock, CONFIG.transfer_timeout_s + 1)
    assert d.connector.idle


def test_a_start_of_which_nothing_more_is_heard(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    p.prefill(at_p, P_TABLE)
    d.poll()
    polled(d, clock, CONFIG.transfer_timeout_s - 1)
    assert p.transport.receive() == []
    polled(d, clock, 2)
    settle(p, d)
    assert p.reasons(at_p) == [Reason.PEER_CANCELLED]
    assert p.sent == [at_p.request_id]


def test_more_starts_than_d_cares_to_remember(hub: MemoryHub, clock: Clock, p: Prefill) -> None:
    d = End(hub, "small", clock, HandoffConfig(max_early=2))
    requests = [p.add(d, name=f"r{n}") for n in range(3)]
    for n, request in enumerate(requests):
        p.compute(request, [n + 1], 10)
        d.poll()
    settle(p, d)
    assert [p.reasons(request) for request in requests] == [[], [], [Reason.PEER_CANCELLED]]
    for request in requests:
        p.connector.abandon_source(request.request_id)
    settle(p)
    d.close()


# ---------------------------------------------------------------------- while a step is computed


def test_p_may_write_only_once_the_step_that_reserved_has_begun(p: Prefill, d: Decode) -> None:
    """Until then the step before may still write to these blocks, for whoever had them."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.poll()
    d.plan_to_reserve(at_d, D_TABLE)
    settle(p, d)
    assert d.told(at_d) == [STARTED]
    assert p.told(at_p) == []
    assert d.is_untouched(D_TABLE)
    d.begin_step()
    arrives(p, d, at_d)


def test_p_gives_up_before_the_step_that_reserved_has_begun(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE[:1], 16)
    d.poll()
    d.plan_to_reserve(at_d, D_TABLE)
    p.connector.abandon_source(at_p.request_id)
    p.poll()
    d.poll()
    assert d.reasons(at_d) == [Reason.CANCELLED]
    d.begin_step()
    d.end(at_d)
    d.poll()
    assert RESERVED not in d.told(at_d)
    assert d.received == {at_d.request_id: ()}  # its blocks come back
    assert d.is_untouched(D_TABLE)


def test_the_last_blocks_travel_while_another_step_is_computed(p: Prefill, d: Decode) -> None:
    """P does not wait for the next step to begin."""
    at_p = p.add(d, 16)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE[:1], 16)
    d.poll()
    d.reserve(at_d, D_TABLE[:1])
    p.connector.poll()
    assert not p.connector.sources[at_p.request_id].writing
    assert p.finish(at_p)
    assert p.connector.sources[at_p.request_id].writing
    arrives(p, d, at_d)
