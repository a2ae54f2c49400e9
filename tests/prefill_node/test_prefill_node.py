"""What a prefill node tells its caller, and when. Its other end is a real decode node."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from protocol import Delta, FinishReason, GenerationRequest, SamplingParams, Timeline
from tests.hash_model import expected_tokens, prompt_of
from tests.kv_transfer.handoff_world import World


def fail_the_push(world: World) -> GenerationRequest:
    request = world.ask(prompt_of(40), 8)
    world.give_p(request)
    world.give_d(request)
    world.go_on(6, writes=False)
    (write,) = world.network.writes
    write.fail()
    world.go_on(2)
    return request


@pytest.fixture
def world() -> World:
    return World()


def first_tokens(request: GenerationRequest, count: int = 1) -> tuple[int, ...]:
    return tuple(expected_tokens(request.prompt_token_ids, SamplingParams(max_tokens=count)))


def told_by_p(world: World, request: GenerationRequest) -> list[Delta]:
    return world.told(world.p, request)


def timeline_of(delta: Delta) -> Timeline:
    assert delta.timeline is not None
    return delta.timeline


def check_nothing_is_left(world: World) -> None:
    world.calm_down()
    world.p.check_nothing_is_left()
    world.d.check_nothing_is_left()


def test_the_first_token_is_told_before_anything_has_travelled(world: World) -> None:
    request = world.ask(prompt_of(40), 8)
    world.give_p(request)
    for _ in range(4):
        world.p.round()
    (delta,) = told_by_p(world, request)
    assert delta == Delta(
        request_id="r0",
        attempt=0,
        position=0,
        token_ids=first_tokens(request),
        num_cached_tokens=0,
    )
    world.give_d(request)
    world.go_on(10)
    *_, last = told_by_p(world, request)
    assert last.handed_off
    assert (last.position, last.token_ids, last.finish_reason) == (1, (), None)
    timeline = timeline_of(last)
    for instant in ("prefill_queued", "prefill_started", "prefill_finished"):
        assert getattr(timeline, instant) is not None
    for instant in ("first_block_pushed", "last_block_pushed"):
        assert getattr(timeline, instant) is not None
    assert timeline.reserved is None  # that is D's to tell
    check_nothing_is_left(world)


def test_without_a_decode_node_the_request_ends_here(world: World) -> None:
    request = world.ask(prompt_of(40), 1)
    world.give_p(request, decode_endpoint=None)
    for _ in range(5):
        world.p.round()
    (delta,) = told_by_p(world, request)
    assert delta.token_ids == first_tokens(request)
    assert delta.finish_reason is FinishReason.LENGTH
    assert world.network.mail == []
    check_nothing_is_left(world)


def test_the_next_token_after_emitted_ones_without_a_decode_node(world: World) -> None:
    request = world.ask(prompt_of(30), 8)
    expected = first_tokens(request, 4)
    world.give_p(request, emitted=expected[:3], attempt=2, decode_endpoint=None)
    for _ in range(5):
        world.p.round()
    (delta,) = told_by_p(world, request)
    assert (delta.attempt, delta.position, delta.token_ids) == (2, 3, expected[3:])
    check_nothing_is_left(world)


def test_the_last_emitted_token_goes_with_the_kv_of_all_before_it(world: World) -> None:
    """Whatever is sampled in its place, here a token that nobody ever told."""
    request = world.ask(prompt_of(30), 8)
    expected = first_tokens(request, 3)
    emitted = (*expected[:2], 12345)
    world.give_p(request, emitted=emitted, attempt=2)
    world.give_d(request, emitted=emitted, attempt=2)
    for _ in range(100):
        if told_by_p(world, request):
            break
        world.go_on()
    (delta,) = told_by_p(world, request)
    assert (delta.attempt, delta.position, delta.token_ids) == (2, 3, ())
    assert delta.handed_off
    assert timeline_of(delta).prefill_finished is not None
    world.go_on(2)
    (at_d,) = world.d.scheduler.requests.values()
    assert at_d.num_forced_tokens == 2
    assert tuple(at_d.output_token_ids[:3]) == emitted
    assert world.told(world.d, request)[0].position == 3
    world.cancel(request)
    check_nothing_is_left(world)


def test_the_first_token_stops_the_request(world: World) -> None:
    prompt = prompt_of(40)
    (stop,) = expected_tokens(prompt, SamplingParams(max_tokens=1))
    request = world.ask(prompt, 8, stop_token_ids=(stop,))
    world.give_p(request)
    world.give_d(request)
    world.go_on(10)
    (delta,) = told_by_p(world, request)
    assert delta.token_ids == (stop,)
    assert (delta.finish_reason, delta.stop_token_id) == (FinishReason.STOP, stop)
    assert not delta.handed_off
    assert world.told(world.d, request) == []  # D has heard of it from P and lets go
    check_nothing_is_left(world)


def test_more_tokens_than_one_may_be_asked_for_but_not_of_p(world: World) -> None:
    request = world.ask(prompt_of(40), 8, min_tokens=5)
    world.give_p(request)
    world.give_d(request)
    world.go_on(20)
    assert [delta.token_ids for delta in told_by_p(world, request)] == [first_tokens(request), ()]
    world.check_answers()
    check_nothing_is_left(world)


def test_there_is_nobody_at_the_endpoint(world: World) -> None:
    request = world.ask(prompt_of(40), 8)
    world.give_p(request, decode_endpoint="played:nobody")
    for _ in range(2):
        world.p.round()
    (delta,) = told_by_p(world, request)
    assert delta.failure is not None
    assert (delta.failure.label, delta.failure.retryable) == ("transfer_failed", True)
    assert "peer_lost (there is no node at played:nobody)" in delta.failure.message
    for _ in range(2):
        world.p.round()
    assert world.p.runner._known == {}
    check_nothing_is_left(world)


def test_the_decode_node_has_other_blocks(world: World) -> None:
    pool = world.d.transport._pool
    other = msgspec.structs.replace(pool.layout, dtype="bfloat16")
    world.d.transport._pool = dataclasses.replace(pool, layout=other)
    request = world.ask(prompt_of(40), 8)
    world.give_p(request)
    for _ in range(2):
        world.p.round()
    (delta,) = told_by_p(world, request)
    assert delta.failure is not None
    assert (delta.failure.label, delta.failure.retryable) == ("transfer_failed", True)
    assert "layout (dtype is float32 on played:p, but bfloat16" in delta.failure.message
    check_nothing_is_left(world)


def test_a_push_that_fails_after_the_first_token(world: World) -> None:
    request = fail_the_push(world)
    token, failure = told_by_p(world, request)
    assert token.token_ids == first_tokens(request)
    assert failure.failure is not None
    assert (failure.failure.label, failure.failure.retryable) == ("transfer_failed", True)
    assert "write_failed" in failure.failure.message
    assert failure.timeline is not None
    assert world.p.connector.counts().outcomes == {"retry": 1}
    check_nothing_is_left(world)


def test_a_push_that_fails_is_the_end_if_so_configured() -> None:
    world = World(on_transfer_failure="fail")
    request = fail_the_push(world)
    _, failure = told_by_p(world, request)
    assert failure.failure is not None
    assert (failure.failure.label, failure.failure.retryable) == ("transfer_failed", False)
    assert world.p.connector.counts().outcomes == {"fail": 1}
    check_nothing_is_left(world)


def test_a_push_that_fails_may_be_left_to_d() -> None:
    """D hears of it and computes the prompt; for P that is the end of a hand-off like any."""
    world = World(on_transfer_failure="recompute")
    request = fail_the_push(world)
    token, last = told_by_p(world, request)
    assert token.token_ids == first_tokens(request)
    assert last.handed_off
    assert last.failure is None
    check_nothing_is_left(world)


def test_a_node_that_is_gone_cannot_compute_anything() -> None:
    world = World(on_transfer_failure="recompute")
    request = world.ask(prompt_of(40), 8)
    world.give_p(request, decode_endpoint="played:nobody")
    for _ in range(2):
        world.p.round()
    (delta,) = told_by_p(world, request)
    assert delta.failure is not None
    assert delta.failure.retryable
    check_nothing_is_left(world)


def test_what_was_given_up_is_computed_again_without_a_word(world: World) -> None:
    """Its blocks went to another request while D had no room; the client notices nothing."""
    first = world.ask(prompt_of(80, 1), 8)
    second = world.ask(prompt_of(80, 2), 8)
    world.give_p(first)
    for _ in range(9):
        world.p.round()
    world.give_p(second)
    for _ in range(9):
        world.p.round()
    assert world.p.scheduler.stats.num_revoked_pins == 1
    world.give_d(first)
    world.give_d(second)
    world.go_on(40)
    for request in (first, second):
        deltas = told_by_p(world, request)
        assert [delta.token_ids for delta in deltas] == [first_tokens(request), ()]
        assert deltas[-1].handed_off
    world.check_answers()
    check_nothing_is_left(world)


@pytest.mark.parametrize("rounds", range(12))
def test_a_cancelled_job_is_never_heard_of_again(world: World, rounds: int) -> None:
    """Wherever it is: queued, computing, waiting for D, pushing."""
    request = world.ask(prompt_of(60), 8)
    world.give_p(request)
    world.give_d(request)
    world.go_on(rounds, writes=False)
    before = len(told_by_p(world, request))
    world.cancel(request)
    check_nothing_is_left(world)
    assert len(told_by_p(world, request)) == before


def test_a_queue_on_p_holds_nothing_on_d(world: World) -> None:
    busy = [world.ask(prompt_of(100, seed), 8) for seed in range(2)]
    for request in busy:
        world.give_p(request)
    late = world.ask(prompt_of(30), 8, priority=1)
    world.give_p(late)
    world.give_d(late)
    world.go_on(2)
    assert world.d.host.status().num_intake == 1
    assert world.d.host.status().blocks.used == 0
    for request in busy:
        world.cancel(request)
    world.go_on(30)
    world.check_answers()
    check_nothing_is_left(world)
