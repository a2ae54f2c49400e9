"""One end of a hand-off drains while it is under way: both callers hear it once, all is freed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import OnTransferFailure
from protocol import Delta, NodeDraining
from tests.hash_model import prompt_of
from tests.kv_transfer.handoff_world import PlayedNode, World

LONG_AGO = 0.0


def drain(node: PlayedNode, deadline: float = LONG_AGO) -> None:
    node.host._drain.begin(deadline)


def check_at_rest(world: World) -> None:
    world.calm_down()
    for node in (world.p, world.d):
        node.check_nothing_is_left()


def check_last_words(deltas: list[Delta]) -> None:
    """At most one, and nothing behind it."""
    ends = [d for d in deltas if d.failure or d.finish_reason or d.handed_off]
    assert ends in ([], deltas[-1:])


@pytest.mark.parametrize("policy", ["retry", "recompute", "fail"])
@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("rounds", range(14))
def test_at_any_moment(rounds: int, side: str, policy: OnTransferFailure) -> None:
    world = World(on_transfer_failure=policy)
    request = world.ask(prompt_of(60), 4)
    world.give_p(request)
    world.give_d(request)
    world.go_on(rounds, writes=rounds > 8)
    drained = {"p": world.p, "d": world.d}[side]
    before = [node.host.jobs.copy() for node in (world.p, world.d)]
    drain(drained)
    world.go_on(1)
    assert not drained.host.jobs
    world.cancel(request)  # as the dispatcher does with what the other node has of it
    world.cancelled.clear()
    told = [world.told(node, request) for node in (world.p, world.d)]
    for deltas in told:
        check_last_words(deltas)
        failures = [delta.failure for delta in deltas if delta.failure is not None]
        assert all(f.retryable and f.label == NodeDraining.label for f in failures)
    if before["pd".index(side)]:  # it was in the middle of it
        last = told["pd".index(side)][-1]
        assert last.failure or last.finish_reason or last.handed_off
    check_at_rest(world)


@pytest.mark.parametrize("side", ["p", "d"])
def test_the_other_end_hears_why(side: str) -> None:
    """Also where a transfer that fails is the end of a request: this one has not failed."""
    world = World(on_transfer_failure="fail")
    request = world.ask(prompt_of(60), 8)
    world.give_p(request)
    world.give_d(request)
    world.go_on(6, writes=False)
    drained, other = (world.p, world.d) if side == "p" else (world.d, world.p)
    assert drained.host.jobs
    assert other.host.jobs
    drain(drained)
    world.go_on(4)
    failure = world.told(other, request)[-1].failure
    assert failure is not None
    assert (failure.label, failure.retryable) == (NodeDraining.label, True)
    for node in (world.p, world.d):
        counts = node.connector.counts()
        assert counts.reasons == {"draining": 1}
        assert (counts.aborted, counts.failed) == (1, 0)
    check_at_rest(world)


def test_kv_on_its_way_may_arrive() -> None:
    """P has the first token and D has room: a moment after the deadline all is done."""
    world = World()
    request = world.ask(prompt_of(60), 8)
    world.give_p(request)
    world.give_d(request)
    world.go_on(6, writes=False)
    assert world.network.writes
    assert world.told(world.p, request)  # its first token
    drain(world.p, time.monotonic())
    world.go_on(30)
    assert world.told(world.p, request)[-1].handed_off
    world.check_answers()
    check_at_rest(world)
    assert world.p.host._drain.drained


def test_a_prompt_that_is_not_computed_is_not_waited_for() -> None:
    world = World()
    request = world.ask(prompt_of(100), 8)
    world.give_p(request)
    world.give_d(request)
    world.go_on(2, writes=False)
    assert not world.told(world.p, request)
    drain(world.p, time.monotonic())
    world.go_on(1)
    (delta,) = world.told(world.p, request)
    assert delta.failure is not None
    world.go_on(3)
    assert world.told(world.d, request)[-1].failure is not None
    check_at_rest(world)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 110), min_size=1, max_size=6),
    moments=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from(["p", "d"]), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    policy=st.sampled_from(["retry", "recompute", "fail"]),
    pipelined=st.booleans(),
    reserve=st.sampled_from(["on_start", "on_arrival"]),
)
def test_drains_among_many_requests(
    lengths: list[int],
    moments: list[tuple[int, str, bool]],
    policy: OnTransferFailure,
    pipelined: bool,
    reserve: str,
) -> None:
    """Every job ends once, with right tokens or as one to be tried again; no block is lost."""
    world = World(on_transfer_failure=policy, pipelined=pipelined, reserve=reserve)  # type: ignore[arg-type]
    for seed, length in enumerate(lengths):
        request = world.ask(prompt_of(length, seed), 5)
        world.give_p(request)
        world.give_d(request)
    for rounds, side, writes in moments:
        world.go_on(rounds, writes=writes)
        node = {"p": world.p, "d": world.d}[side]
        drain(node)
        node.round()
        assert not node.host.jobs
        node.host._drain.end()
    check_at_rest(world)
    world.check_answers()
    for request in world.requests.values():
        for node in (world.p, world.d):
            deltas = world.told(node, request)
            check_last_words(deltas)
            assert all(d.failure.retryable for d in deltas if d.failure is not None)
