from __future__ import annotations

import itertools

import pytest

from kv_transfer import HandoffState, Reason
from kv_transfer.states import ended_state

HAPPY = [
    HandoffState.RESERVING,
    HandoffState.READY,
    HandoffState.PUSHING,
    HandoffState.COMMITTED,
]
UNHAPPY = [HandoffState.ABORTED, HandoffState.EXPIRED, HandoffState.FAILED]


def test_the_happy_way_leads_from_state_to_state() -> None:
    for state, later in itertools.pairwise(HAPPY):
        assert state.may_become(later)
        # Only a reservation can be taken back.
        assert later.may_become(state) == (later is HandoffState.READY)
    # D may have everything already.
    assert HandoffState.READY.may_become(HandoffState.COMMITTED)
    assert not HandoffState.RESERVING.may_become(HandoffState.COMMITTED)
    assert not HandoffState.RESERVING.may_become(HandoffState.PUSHING)


@pytest.mark.parametrize("state", HandoffState)
def test_every_state_either_ends_unhappily_or_has_ended(state: HandoffState) -> None:
    assert state.ended == (state is HandoffState.COMMITTED or state in UNHAPPY)
    for later in HandoffState:
        if state.ended:
            assert not state.may_become(later)
        elif later in UNHAPPY:
            assert state.may_become(later)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_leads_to_an_unhappy_end(reason: Reason) -> None:
    assert ended_state(reason) in UNHAPPY


def test_what_was_wished_for_is_no_failure() -> None:
    assert {r for r in Reason if ended_state(r) is HandoffState.ABORTED} == {
        Reason.ENDED_BY_FIRST_TOKEN,
        Reason.CANCELLED,
        Reason.PEER_CANCELLED,
        Reason.DRAINING,
    }
    assert {r for r in Reason if ended_state(r) is HandoffState.EXPIRED} == {Reason.DEADLINE}
