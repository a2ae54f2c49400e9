"""D wants blocks back that it has reserved, which P may have begun to write to."""

from __future__ import annotations

import pytest

from kv_transfer import HandoffState, Reason
from kv_transfer.wire import Destination, Message, Revoke, Revoked
from tests.kv_transfer.handoff_ends import (
    CONFIG,
    D_TABLE,
    P_TABLE,
    RECOMPUTE,
    RESERVED,
    SENT,
    Clock,
    Decode,
    FakeRequest,
    Prefill,
    arrives,
    lose,
    settle,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")

OTHER_TABLE = (3, 21, 12)


def reserved_early(p: Prefill, d: Decode) -> tuple[FakeRequest, FakeRequest]:
    """P knows D's blocks, and has nothing to write to them yet."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 10)
    d.poll()
    d.reserve(at_d, D_TABLE)
    p.poll()
    assert p.connector.sources[at_p.request_id].destination is not None
    return at_p, at_d


def goes_on(p: Prefill, d: Decode, at_p: FakeRequest, at_d: FakeRequest) -> None:
    """D reserves once more, and P computes the rest."""
    d.reserve(at_d, OTHER_TABLE)
    p.compute(at_p, P_TABLE, at_p.num_prompt_tokens - at_p.num_computed_tokens)
    d.poll()  # hears of the start now, if it came before that
    assert p.finish(at_p)
    arrives(p, d, at_d)
    assert d.told(at_d).count(RESERVED) == 2
    assert d.is_untouched(D_TABLE)


def test_what_p_does_not_know_of_is_taken_back_at_once(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    d.reserve(at_d, D_TABLE)
    assert d.connector.revoke_reservation(at_d.request_id)
    d.poll()
    assert d.revoked == [at_d.request_id]
    assert p.read() == []
    goes_on(p, d, at_p, at_d)


def test_before_the_step_that_reserved_has_begun(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 10)
    d.poll()
    d.plan_to_reserve(at_d, D_TABLE)
    assert d.connector.revoke_reservation(at_d.request_id)
    d.begin_step()
    d.poll()
    assert d.revoked == [at_d.request_id]
    assert p.read() == []
    assert RESERVED not in d.told(at_d)
    d.reserve(at_d, OTHER_TABLE)
    p.compute(at_p, P_TABLE, 30)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_p_gives_them_back_if_it_has_not_begun(p: Prefill, d: Decode) -> None:
    at_p, at_d = reserved_early(p, d)
    for _ in range(3):
        assert d.connector.revoke_reservation(at_d.request_id)
    d.poll()
    assert d.revoked == []  # it is for P to say
    assert p.read() == [Revoke(at_p.ticket, 1)]  # once, however often the scheduler asks
    d.say(p, Revoke(at_p.ticket, 1))
    settle(p, d)
    assert d.revoked == [at_d.request_id]
    assert d.connector.sinks[at_d.request_id].state is HandoffState.RESERVING
    assert p.connector.sources[at_p.request_id].state is HandoffState.RESERVING
    assert not d.connector.revoke_reservation(at_d.request_id)  # there is none any more
    goes_on(p, d, at_p, at_d)


def test_p_refuses_if_it_has_begun(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 32)
    d.reserve(at_d, D_TABLE)
    gate = p.pool.gate(P_TABLE[1])
    p.compute(at_p, P_TABLE, 4)
    gate.wait_until_reached()
    assert d.connector.revoke_reservation(at_d.request_id)  # it has not heard of the push yet
    settle(d, p)
    assert d.connector.sinks[at_d.request_id].state is HandoffState.PUSHING
    assert not d.connector.revoke_reservation(at_d.request_id)
    gate.open()
    p.compute(at_p, P_TABLE, 4)
    p.finish(at_p)
    arrives(p, d, at_d)
    assert d.revoked == []


def test_a_question_that_crosses_the_commit(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    assert d.connector.revoke_reservation(at_d.request_id)
    arrives(p, d, at_d)
    settle(p, d)
    assert d.revoked == []


@pytest.mark.parametrize("times", [1, 2])
def test_a_destination_that_comes_after_it_was_given_back(
    p: Prefill, d: Decode, times: int
) -> None:
    at_p, at_d = reserved_early(p, d)
    old = d.connector.sinks[at_d.request_id].destination()
    d.connector.revoke_reservation(at_d.request_id)
    settle(d, p)
    assert d.revoked == [at_d.request_id]
    for _ in range(times):
        d.say(p, old)
    p.poll()
    assert p.connector.sources[at_p.request_id].destination is None
    p.compute(at_p, P_TABLE, 20)
    p.compute(at_p, P_TABLE, 0)
    assert not p.connector.sources[at_p.request_id].writing
    goes_on(p, d, at_p, at_d)


@pytest.mark.parametrize("lost", [Revoke, Revoked])
def test_a_lost_question_or_answer_is_repeated(
    p: Prefill, d: Decode, clock: Clock, lost: type[Message]
) -> None:
    at_p, at_d = reserved_early(p, d)
    d.connector.revoke_reservation(at_d.request_id)
    d.poll()
    if lost is Revoke:
        lose(lost, d, p)
    else:
        p.poll()
        lose(lost, p, d)
    settle(d, p)
    assert d.revoked == []
    clock.advance(CONFIG.heartbeat_s + 0.1)
    settle(d, p)
    assert d.revoked == [at_d.request_id]
    goes_on(p, d, at_p, at_d)


def test_an_answer_that_comes_twice_does_not_take_the_next_reservation(
    p: Prefill, d: Decode
) -> None:
    at_p, at_d = reserved_early(p, d)
    d.connector.revoke_reservation(at_d.request_id)
    settle(d, p)
    d.reserve(at_d, OTHER_TABLE)
    assert d.connector.revoke_reservation(at_d.request_id)
    p.say(d, Revoked(at_p.ticket, 1))  # of the first
    d.connector.poll()
    assert d.connector.sinks[at_d.request_id].state is HandoffState.READY
    settle(p, d)
    assert d.revoked == [at_d.request_id] * 2
    p.say(d, Revoked(at_p.ticket, 2))
    d.reserve(at_d, OTHER_TABLE)
    p.compute(at_p, P_TABLE, 30)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_the_request_ends_while_p_is_asked(p: Prefill, d: Decode) -> None:
    at_p, at_d = reserved_early(p, d)
    d.connector.revoke_reservation(at_d.request_id)
    d.end(at_d)
    settle(d, p)
    assert d.received == {at_d.request_id: ()}  # its blocks come back this way, and only once
    assert d.revoked == []
    p.until(lambda: SENT in p.told(at_p))
    assert p.reasons(at_p) == [Reason.PEER_CANCELLED]


def test_the_request_ends_before_its_blocks_were_told_to_be_free(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    d.reserve(at_d, D_TABLE)
    d.connector.revoke_reservation(at_d.request_id)
    d.end(at_d)
    settle(d, p)
    assert d.revoked == [at_d.request_id]
    assert d.received == {}
    p.connector.abandon_source(at_p.request_id)


def test_p_computes_again_only_once_what_it_gave_up(p: Prefill, d: Decode) -> None:
    """D reserves, wants its blocks back and reserves again, while P computes a second time."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    assert p.connector.revoke_pin() == at_p.request_id
    d.poll()
    d.reserve(at_d, D_TABLE)
    p.poll()
    assert p.told(at_p) == [RECOMPUTE]
    at_p.finish_reason, at_p.output_token_ids, at_p.num_computed_tokens = None, [], 0
    p.compute(at_p, (20, 21, 22), 10)
    d.connector.revoke_reservation(at_d.request_id)
    settle(d, p)
    assert d.revoked == [at_d.request_id]
    d.reserve(at_d, OTHER_TABLE)
    p.poll()
    assert p.told(at_p) == [RECOMPUTE]
    p.compute(at_p, (20, 21, 22), 30)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_what_was_given_up_while_it_was_computed_again(p: Prefill, d: Decode) -> None:
    """The second run ends without a destination, and its pin is given up too."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    p.connector.revoke_pin()
    d.poll()
    d.reserve(at_d, D_TABLE)
    p.poll()
    d.connector.revoke_reservation(at_d.request_id)
    settle(d, p)
    p.prefill_again(at_p, (20, 21, 22))
    assert p.connector.revoke_pin() == at_p.request_id
    d.reserve(at_d, OTHER_TABLE)
    p.poll()
    assert p.told(at_p) == [RECOMPUTE] * 2
    p.prefill_again(at_p, P_TABLE)
    arrives(p, d, at_d)


def test_there_is_nothing_to_revoke(p: Prefill, d: Decode) -> None:
    assert not d.connector.revoke_reservation("unknown/0")
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    assert not d.connector.revoke_reservation(at_d.request_id)
    d.say(p, Revoke(at_p.ticket, 1))  # of which P has never heard
    p.poll()
    assert d.read() == [Revoked(at_p.ticket, 1)]
    d.say(p, Destination(at_p.ticket, 1, 0, D_TABLE))
    p.poll()
    assert p.connector.sources[at_p.request_id].destination is None
    p.connector.abandon_source(at_p.request_id)
    settle(p, d)
    d.end(at_d)
