"""P lacks blocks, and takes those of a hand-off: they are computed and pushed again."""

from __future__ import annotations

import pytest

from kv_transfer import Reason, WriteState
from protocol import FinishReason
from tests.kv_transfer.handoff_ends import (
    CONFIG,
    D_TABLE,
    P_TABLE,
    PUSHED,
    RECOMPUTE,
    SENT,
    Clock,
    Decode,
    FakeStep,
    Prefill,
    arrives,
    kv_of,
    settle,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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
    d.until(lambda: at_d.request_id in d.received)
    for request in (*requests.values(), computing):  # D has not heard of them
        d.connector._receive._early.pop(request.ticket, None)


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


def test_what_is_found_while_it_is_computed_does_not_travel_yet(p: Prefill, d: Decode) -> None:
    """In the step that starts a request, its cache hits may be another's work of this very step."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    assert p.connector.revoke_pin() == at_p.request_id
    settle(p, d)
    d.reserve(at_d, D_TABLE)
    p.poll()
    at_p.table, at_p.num_computed_tokens = (20, 21, 22), 32
    p.connector.start_load_kv(p.connector.build_connector_meta(FakeStep([at_p])))
    assert not p.connector.sources[at_p.request_id].writing
    for number, block_id in enumerate(at_p.table):
        p.pool.bytes[block_id] = kv_of(at_p.ticket, number)
    assert p.finish(at_p)
    arrives(p, d, at_d)


@pytest.mark.parametrize("reserved_before", [True, False])
def test_a_request_that_lost_its_blocks_while_its_last_step_ran(
    p: Prefill, d: Decode, reserved_before: bool
) -> None:
    """It has its first token, and nothing to push: it is computed again once D has room."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 40)
    settle(p, d)
    if reserved_before:
        d.reserve(at_d, D_TABLE)
        p.connector.poll()
    p.preempt(at_p)
    assert not p.finish(at_p, token=7)  # there is nothing to keep
    p.poll()
    if not reserved_before:
        assert RECOMPUTE not in p.told(at_p)
        d.reserve(at_d, D_TABLE)
        p.poll()
    assert p.told(at_p).count(RECOMPUTE) == 1
    p.until(lambda: not p.connector.sources[at_p.request_id].writing)
    p.prefill_again(at_p, (20, 21, 22), token=8)
    arrives(p, d, at_d, tokens=(7,))
