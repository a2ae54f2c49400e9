"""What two nodes do to each other while one request goes from P to D."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kv_transfer import (
    EventKind,
    HandoffConfig,
    HandoffState,
    LayoutMismatch,
    MemoryHub,
    PeerUnreachable,
    Reason,
    WriteState,
)
from kv_transfer.wire import (
    Cancel,
    Closed,
    Commit,
    Destination,
    Heartbeat,
    PrefillStarted,
    decode,
)
from protocol import FinishReason, HandoffTicket, TransferCounts
from tests.kv_transfer.handoff_ends import (
    BLOCK,
    CONFIG,
    Clock,
    Decode,
    End,
    FakeRequest,
    Prefill,
    kv_of,
)
from tests.kv_transfer.pools import LAYOUT

STARTED, RESERVED, COMMITTED = EventKind.STARTED, EventKind.RESERVED, EventKind.COMMITTED
LOST, PUSHED, RECOMPUTE, SENT = (
    EventKind.LOST,
    EventKind.PUSHED,
    EventKind.RECOMPUTE,
    EventKind.SENT,
)

P_TABLE, D_TABLE = (4, 9, 2), (31, 5, 17)  # of a request of 40 tokens: two and a half blocks


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
def p(hub: MemoryHub, clock: Clock) -> Iterator[Prefill]:
    end = Prefill(hub, "p", clock)
    yield end
    end.transport.close()


@pytest.fixture
def d(hub: MemoryHub, clock: Clock) -> Iterator[Decode]:
    end = Decode(hub, clock)
    yield end
    end.transport.close()


@pytest.fixture(autouse=True)
def nothing_is_left(p: Prefill, d: Decode) -> Iterator[None]:
    yield
    for _ in range(4):  # last words cross each other
        p.poll()
        d.poll()
    p.check_empty()
    d.check_empty()


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
    d.poll()
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
    d.poll()
    assert d.received == {at_d.request_id: (7,)}
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
    d.poll()
    assert d.received == {at_d.request_id: (n,) for n, (_, at_d) in enumerate(pairs)}
    assert all(d.holds_kv_of(at_d) for _, at_d in pairs)


def test_checksums_can_be_off(hub: MemoryHub, clock: Clock, d: Decode) -> None:
    p = Prefill(hub, "p2", clock, checksums=False)
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    p.transport.close()


def test_nothing_lands_under_a_ticket_that_is_over(p: Prefill, d: Decode) -> None:
    """D's blocks are the request's own now; even P may not write to them again."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    late = p.transport.write(d.endpoint, at_p.ticket, [(P_TABLE[0], D_TABLE[0])])
    p.until(lambda: late.state is not WriteState.PENDING)
    assert late.state is WriteState.FAILED


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
    at_p = p.add(d)
    p.prefill(at_p, P_TABLE)
    d.poll()
    clock.advance(CONFIG.transfer_timeout_s)
    settle(p, d)
    assert p.reasons(at_p) == []
    clock.advance(0.1)
    settle(d, p)
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
    d.transport.close()


# ---------------------------------------------------------------------- P lacks blocks


def test_what_a_preemption_overwrote_is_pushed_again(p: Prefill, d: Decode) -> None:
    """A write reads blocks 0 and 1 while they get another owner: it is void."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[1])
    p.compute(at_p, P_TABLE, 4)  # starts to push the first two
    gate.wait_until_reached()
    p.preempt(at_p)
    gate.open()
    p.until(lambda: not p.connector.sources[at_p.request_id].writing)
    assert PUSHED not in p.told(at_p)
    assert not d.holds_kv_of(at_d)
    p.compute(at_p, (20, 21, 22), 40)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_a_void_write_that_ends_after_all_is_computed_again(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[0])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    p.preempt(at_p)
    p.prefill_again(at_p, (20, 21, 22))
    p.poll()
    assert p.connector.sources[at_p.request_id].writing
    assert p.told(at_p) == []
    gate.open()
    arrives(p, d, at_d)
    assert p.connector.counts().blocks == 3


def test_a_write_that_had_ended_before_anybody_looked_is_void_too(p: Prefill, d: Decode) -> None:
    """Whether it read before or after the blocks were overwritten, nobody knows."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[0])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    p.pool.bytes[list(P_TABLE)] = 0xBB  # their new owner was quick
    write = p.connector.sources[at_p.request_id]._write
    assert write is not None
    gate.open()
    while write.state is WriteState.PENDING:
        p._activity.wait(0.1)
    p.preempt(at_p)
    assert p.told(at_p) == []
    p.compute(at_p, (20, 21, 22), 40)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_what_arrived_before_a_preemption_is_not_pushed_again(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 16)
    d.reserve(at_d, D_TABLE)
    p.compute(at_p, P_TABLE, 4)
    p.until(lambda: PUSHED in p.told(at_p))
    p.preempt(at_p)
    p.compute(at_p, (20, 21, 22), 16)
    p.compute(at_p, (20, 21, 22), 24)
    p.finish(at_p)
    arrives(p, d, at_d)
    assert p.connector.counts().blocks == 3


def test_a_request_that_is_aborted_after_its_preemption(p: Prefill, d: Decode) -> None:
    """The void write still reads blocks and writes to D: both wait for its end."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[0])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    p.preempt(at_p)
    p.finish(at_p, FinishReason.ABORT)
    settle(p, d)
    assert p.reasons(at_p) == []
    assert d.reasons(at_d) == []
    gate.open()
    p.until(lambda: SENT in p.told(at_p))
    d.poll()
    assert d.reasons(at_d) == [Reason.CANCELLED]
    d.end(at_d)


def test_the_youngest_pin_without_a_destination_is_given_up(p: Prefill, d: Decode) -> None:
    assert p.connector.revoke_pin() is None
    requests = {}
    for name, at in (("old", 1.0), ("young", 3.0), ("reserved", 4.0), ("middle", 2.0)):
        requests[name] = p.add(d, 16, name=name, at=at)
        p.prefill(requests[name], [len(requests)])
    computing = p.add(d, 32, name="computing", at=9.0)
    p.compute(computing, [10, 11], 16)
    at_d = d.add(p, requests["reserved"])
    d.reserve(at_d, [1])
    p.poll()
    revoked = [p.connector.revoke_pin() for _ in range(4)]
    assert revoked == ["young/0", "middle/0", "old/0", None]
    p.until(lambda: SENT in p.told(at_d))
    for request in (*requests.values(), computing):
        p.connector.abandon_source(request.request_id)
    p.poll()
    assert p.sent == ["reserved/0"]  # the others' blocks were given up before
    d.poll()
    for request in (*requests.values(), computing):  # D has not heard of them
        d.connector._early.pop(request.ticket, None)


@pytest.mark.parametrize("again", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_pin_that_was_given_up_is_computed_again(
    p: Prefill, d: Decode, again: FinishReason
) -> None:
    """The client has its first token: whatever is sampled the second time is forgotten."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE, token=7)
    settle(p, d)
    assert p.connector.revoke_pin() == at_p.request_id
    p.pool.bytes[list(P_TABLE)] = 0xBB
    p.poll()
    assert p.told(at_p) == []
    d.reserve(at_d, D_TABLE)
    p.poll()
    assert p.told(at_p) == [RECOMPUTE]
    at_p.finish_reason, at_p.output_token_ids, at_p.num_computed_tokens = None, [], 0
    p.compute(at_p, (20, 21, 22), 40)
    assert p.finish(at_p, again, token=8)
    arrives(p, d, at_d, tokens=(7,))
    assert p.told(at_p).count(RECOMPUTE) == 1


def test_a_recompute_that_is_aborted(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    assert p.connector.revoke_pin() == at_p.request_id
    settle(p, d)
    d.reserve(at_d, D_TABLE)
    p.poll()
    at_p.finish_reason, at_p.output_token_ids, at_p.num_computed_tokens = None, [], 0
    p.compute(at_p, (20, 21, 22), 16)
    p.finish(at_p, FinishReason.ABORT)
    p.until(lambda: SENT in p.told(at_p))
    d.poll()
    assert d.reasons(at_d) == [Reason.CANCELLED]
    d.end(at_d)


def test_a_recompute_may_wait_for_its_turn(p: Prefill, d: Decode, clock: Clock) -> None:
    """P is busy, and says that it lives: that is no reason to give up."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    assert p.connector.revoke_pin() == at_p.request_id
    settle(p, d)
    clock.advance(CONFIG.reserve_timeout_s - 1)
    d.reserve(at_d, D_TABLE)
    p.poll()
    assert p.told(at_p) == [RECOMPUTE]
    for _ in range(100):
        clock.advance(CONFIG.heartbeat_s + 0.1)
        settle(p, d)
    assert (p.reasons(at_p), d.reasons(at_d)) == ([], [])
    p.prefill_again(at_p, (20, 21, 22))
    arrives(p, d, at_d)


# ---------------------------------------------------------------------- damage


def test_a_block_that_was_damaged_on_its_way(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    d.pool.bytes[D_TABLE[1], 100] ^= 1
    d.poll()
    assert COMMITTED not in d.told(at_d)
    assert d.reasons(at_d) == [Reason.CHECKSUM]
    assert d.received == {}
    d.end(at_d, FinishReason.ERROR)
    d.poll()
    assert d.received == {at_d.request_id: ()}
    assert d.connector.counts() == TransferCounts(failed=1)
    assert p.connector.counts().committed == 1  # it did its part


@pytest.mark.parametrize("num_checksums", [1, 2, 4])
def test_a_commit_with_another_number_of_checksums(
    p: Prefill, d: Decode, num_checksums: int
) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 20)
    d.reserve(at_d, D_TABLE)
    p.say(d, Commit(at_p.ticket, (7,), (0,) * num_checksums))
    d.poll()
    assert d.reasons(at_d) == [Reason.CHECKSUM]
    d.end(at_d)
    p.connector.abandon_source(at_p.request_id)
    p.until(lambda: SENT in p.told(at_p))


def test_a_commit_for_which_nothing_was_reserved(p: Prefill, d: Decode) -> None:
    """D has no block of it, so whatever P believes, nothing is here."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.say(d, Commit(at_p.ticket, (7,), ()))
    d.poll()
    assert d.told(at_d) == [LOST]
    assert d.connector.get_num_new_matched_tokens(at_d, 0) == (None, False)
    d.end(at_d)
    p.connector.abandon_source(at_p.request_id)


def test_a_destination_that_is_too_small(p: Prefill, d: Decode) -> None:
    """It ends this hand-off, not the node."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    p.transport.receive()
    d.say(p, Destination(at_p.ticket, d.endpoint, 0, D_TABLE[:2]))
    p.until(lambda: SENT in p.told(at_p))
    assert p.reasons(at_p) == [Reason.LAYOUT]
    d.poll()
    assert d.reasons(at_d) == [Reason.LAYOUT]
    d.end(at_d)


def test_what_is_no_message_is_dropped(
    p: Prefill, d: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    p.transport.notify(d.endpoint, b"nonsense")
    d.transport.notify(p.endpoint, b"\x92\x02\xc0")
    with caplog.at_level(logging.WARNING):
        d.poll()
        d.reserve(at_d, D_TABLE)
        arrives(p, d, at_d)
    assert "dropped: not a message" in caplog.text
    assert "dropped: the peer speaks version 2" in caplog.text


def test_a_peer_with_other_blocks_is_refused(hub: MemoryHub, clock: Clock, p: Prefill) -> None:
    layout = msgspec.structs.replace(LAYOUT, fingerprint="another model")
    other = End(hub, "other", clock, layout=layout)
    for _ in range(2):
        with pytest.raises(LayoutMismatch, match="fingerprint is f on memory:p, but another model"):
            p.add(other)
    other.transport.close()


def test_nobody_to_push_to(hub: MemoryHub, clock: Clock, p: Prefill, d: Decode) -> None:
    gone = End(hub, "gone", clock)
    gone.transport.close()
    with pytest.raises(PeerUnreachable, match="memory:gone"):
        p.add(gone)


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
    assert d.connector.counts() == TransferCounts(aborted=1)


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
    assert d.connector.counts() == TransferCounts(aborted=1)


# ---------------------------------------------------------------------- deadlines


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


def test_p_waits_for_d_to_reserve_but_not_for_ever(p: Prefill, d: Decode, clock: Clock) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    polled(p, clock, CONFIG.reserve_timeout_s - 1)
    assert p.reasons(at_p) == []
    polled(p, clock, 2)
    assert p.reasons(at_p) == [Reason.DEADLINE]
    assert p.sent == [at_p.request_id]
    assert p.connector.counts() == TransferCounts(expired=1)
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
    (cancel,) = map(decode, p.transport.receive())
    assert cancel == Cancel(at_d.ticket, Reason.DEADLINE, d.endpoint)
    d.connector.drop_sink(at_d.request_id, Reason.CANCELLED)
    assert d.connector.counts() == TransferCounts(expired=1)


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


# ---------------------------------------------------------------------- a peer is gone


def test_d_is_gone_when_p_says_something(p: Prefill, hub: MemoryHub, clock: Clock) -> None:
    d = End(hub, "gone", clock)
    requests = [p.add(d, name=name) for name in "ab"]
    d.transport.close()
    p.compute(requests[0], P_TABLE, 20)
    p.poll()
    assert [p.reasons(request) for request in requests] == [[Reason.PEER_LOST]] * 2


def test_d_is_gone_when_p_pushes(p: Prefill, hub: MemoryHub, clock: Clock) -> None:
    gone = End(hub, "gone", clock, fill=0xDD)
    at_p = p.add(gone)
    p.prefill(at_p, P_TABLE)
    gone.say(p, Destination(at_p.ticket, gone.endpoint, 0, D_TABLE))
    gone.transport.close()
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
    p.transport.close()
    d.reserve(at_d, D_TABLE)
    d.poll()
    assert d.reasons(at_d) == d.reasons(other) == [Reason.PEER_LOST]
    for request in (at_d, other):
        d.end(request)
    d.poll()
    assert d.received == {at_d.request_id: ()}
    assert d.connector.counts() == TransferCounts(failed=2)


def test_the_others_go_on_when_one_peer_is_gone(
    p: Prefill, d: Decode, hub: MemoryHub, clock: Clock
) -> None:
    gone = End(hub, "gone", clock)
    lost = p.add(gone, name="lost")
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    gone.transport.close()
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
    assert {name: d.reasons(request) for name, request in at_d.items()} == dict.fromkeys(
        requests, [Reason.CANCELLED]
    )
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
    d.connector._outbox.clear()


# ---------------------------------------------------------------------- odd messages


Say = Callable[[Prefill, Decode, FakeRequest], None]

ODD: dict[str, Say] = {
    "start": lambda p, d, r: p.say(d, PrefillStarted(r.ticket, p.endpoint)),
    "heartbeat": lambda p, d, r: p.say(d, Heartbeat(r.ticket)),
    "destination": lambda p, d, r: d.say(p, Destination(r.ticket, d.endpoint, 0, D_TABLE)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_repeated_messages_do_no_harm(p: Prefill, d: Decode, clock: Clock, odd: Say) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 20)
    d.poll()
    d.reserve(at_d, D_TABLE)
    for _ in range(3):
        odd(p, d, at_p)
        settle(p, d)
    p.compute(at_p, P_TABLE, 20)
    p.finish(at_p)
    odd(p, d, at_p)
    arrives(p, d, at_d)
    odd(p, d, at_p)
    settle(p, d)
    clock.advance(CONFIG.transfer_timeout_s + 1)
    settle(p, d)
    assert p.reasons(at_p) == [None]
    assert d.told(at_d).count(COMMITTED) == 1


@pytest.mark.parametrize("checksums", [(), (1, 2, 3)])
def test_a_repeated_end_does_no_harm(p: Prefill, d: Decode, checksums: tuple[int, ...]) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    p.say(d, Commit(at_p.ticket, (8,), checksums))
    p.say(d, Closed(at_p.ticket, Reason.WRITE_FAILED))
    d.say(p, Cancel(at_p.ticket, Reason.CANCELLED, d.endpoint))
    settle(d, p)
    assert d.received == {at_d.request_id: (7,)}
    assert d.reasons(at_d) == []


def test_a_commit_that_comes_twice_before_d_looks(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    d.pool.bytes[D_TABLE[0], 0] ^= 1
    commit = next(m for m in d.transport.receive() if isinstance(decode(m), Commit))
    for _ in range(2):
        p.transport.notify(d.endpoint, commit)
    d.poll()
    assert d.reasons(at_d) == [Reason.CHECKSUM]  # told once
    d.end(at_d)


def test_a_stale_generation_is_another_hand_off(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    other = HandoffTicket("r", 1)
    p.say(d, Closed(other, Reason.CANCELLED))
    d.say(p, Cancel(other, Reason.CANCELLED, d.endpoint))
    arrives(p, d, at_d)


def test_whoever_asks_after_an_unknown_hand_off_is_told(p: Prefill, d: Decode) -> None:
    unknown = HandoffTicket("unknown", 3)
    d.say(p, Destination(unknown, d.endpoint, 0, (1,)))
    d.say(p, Cancel(unknown, Reason.DEADLINE, d.endpoint))
    p.poll()
    closed = Closed(unknown, Reason.PEER_CANCELLED)
    assert [decode(message) for message in d.transport.receive()] == [closed, closed]
    for message in (Heartbeat(unknown), Commit(unknown, (1,), ()), closed):
        p.say(d, message)
    d.poll()
    assert list(p.transport.receive()) == []


def test_blocks_are_named_by_their_number_in_the_prompt(p: Prefill, d: Decode) -> None:
    """A table of D may be longer than the prompt; what is behind it does not travel."""
    at_p = p.add(d, 2 * BLOCK)
    at_d = d.add(p, at_p)
    p.prefill(at_p, (1, 2))
    d.reserve(at_d, (5, 6))
    arrives(p, d, at_d)
    assert d.is_untouched([n for n in range(1, 33) if n not in (5, 6)])


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
