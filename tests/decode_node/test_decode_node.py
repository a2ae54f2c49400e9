"""When a decode node reserves blocks, what it tells, and what it lets go."""

from __future__ import annotations

import pytest

from decode_node import DecodeConfig
from decode_node.intake import Intake
from engine import ActiveJob
from kv_transfer import HandoffState
from protocol import ConfigError, DecodeJob, FinishReason, GenerationRequest, SamplingParams
from tests.hash_model import expected_tokens, prompt_of
from tests.kv_transfer.handoff_world import CONFIG, World


@pytest.fixture
def world() -> World:
    return World()


def check_nothing_is_left(world: World) -> None:
    world.calm_down()
    world.p.check_nothing_is_left()
    world.d.check_nothing_is_left()


def answer_of(world: World, request: GenerationRequest) -> list[int]:
    """All tokens of both nodes, once they fit together without a gap."""
    tokens: list[int] = []
    for node in (world.p, world.d):
        for delta in world.told(node, request):
            assert delta.failure is None
            assert delta.position == len(tokens)
            tokens.extend(delta.token_ids)
    return tokens


# ---------------------------------------------------------------------- intake and configuration


def test_an_intake_hands_a_job_on_once() -> None:
    admitted: list[str] = []
    intake = Intake(lambda job: admitted.append(job.key))
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), arrival_time=0.0
    )
    jobs = [ActiveJob(DecodeJob(request=request, caller="c", attempt=n)) for n in range(3)]
    for job in jobs:
        intake.add(job)
    assert (len(intake), admitted) == (3, [])
    intake.start("r/1")
    intake.start("r/1")
    intake.start("unknown/0")
    assert (len(intake), admitted) == (2, ["r/1"])
    assert intake.drop("r/0")
    assert not intake.drop("r/0")
    assert not intake.drop("r/1")
    intake.start("r/0")
    assert (len(intake), admitted) == (1, ["r/1"])


def test_reserve_is_one_of_two_words() -> None:
    assert DecodeConfig().reserve == "on_start"
    with pytest.raises(ConfigError, match="reserve: must be on_start or on_arrival, not 'later'"):
        DecodeConfig(reserve="later")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- when blocks are reserved


def test_a_job_waits_without_blocks_until_its_prefill_starts(world: World) -> None:
    request = world.ask(prompt_of(40), 8)
    world.give_d(request)
    world.go_on(3)
    status = world.d.host.status()
    assert (status.num_intake, status.num_waiting, status.blocks.used) == (1, 0, 0)
    world.give_p(request)
    world.p.round()
    assert world.d.host.status().num_intake == 1
    world.network.deliver()
    world.d.round()
    world.d.round()
    status = world.d.host.status()
    assert (status.num_intake, status.num_skipped_waiting, status.blocks.used) == (0, 1, 3)
    world.go_on(20)
    assert answer_of(world, request) == expected_tokens(prompt_of(40), request.sampling)
    check_nothing_is_left(world)


def test_blocks_on_arrival() -> None:
    world = World(reserve="on_arrival")
    request = world.ask(prompt_of(40), 8)
    world.give_d(request)
    world.d.round()
    status = world.d.host.status()
    assert (status.num_intake, status.num_skipped_waiting, status.blocks.used) == (0, 1, 3)
    world.go_on(5)  # P has not heard of the request yet, which must be no reason to give up
    assert world.told(world.d, request) == []
    world.give_p(request)
    world.go_on(20)
    assert answer_of(world, request) == expected_tokens(prompt_of(40), request.sampling)
    check_nothing_is_left(world)


def test_blocks_on_arrival_do_not_wait_for_ever() -> None:
    world = World(reserve="on_arrival")
    request = world.ask(prompt_of(40), 8)
    world.give_d(request)
    world.go_on()
    world.now += CONFIG.reserve_timeout_s + 1
    world.go_on(3)
    (delta,) = world.told(world.d, request)
    assert delta.failure is not None
    assert "deadline" in delta.failure.message
    check_nothing_is_left(world)


def test_a_prefill_that_started_before_the_job_came(world: World) -> None:
    request = world.ask(prompt_of(40), 8)
    world.give_p(request)
    world.go_on(8)
    world.give_d(request)
    world.d.round()
    assert world.d.host.status().num_intake == 0
    assert world.d.host.status().blocks.used == 3
    world.go_on(20)
    assert answer_of(world, request) == expected_tokens(prompt_of(40), request.sampling)
    check_nothing_is_left(world)


def test_jobs_enter_the_scheduler_with_the_time_that_they_came_with(world: World) -> None:
    """Of two that wait for blocks, the one that arrived first is served first."""
    running = world.ask(prompt_of(100), 40)
    early, late = world.ask(prompt_of(60, 1), 3), world.ask(prompt_of(60, 2), 3)
    world.give_p(running)
    world.give_d(running)
    world.go_on(14)
    for request in (late, early):  # P starts them in the other order
        world.give_d(request)
        world.give_p(request)
        world.go_on(8)
    world.go_on(100)
    finished = [d.request_id for d in world.d.stream.deltas if d.finish_reason]
    assert finished.index(early.request_id) < finished.index(late.request_id)
    world.check_answers()
    check_nothing_is_left(world)


# ---------------------------------------------------------------------- what is told


def test_d_goes_on_behind_the_emitted_tokens(world: World) -> None:
    request = world.ask(prompt_of(40), 8)
    expected = expected_tokens(prompt_of(40), SamplingParams(max_tokens=8))
    world.give_p(request, emitted=tuple(expected[:2]), attempt=1)
    world.give_d(request, emitted=tuple(expected[:2]), attempt=1)
    world.go_on(20)
    deltas = world.told(world.d, request)
    assert deltas[0].position == 2
    assert [token for delta in deltas for token in delta.token_ids] == expected[2:]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    timeline = deltas[-1].timeline
    assert timeline is not None
    assert None not in (timeline.reserved, timeline.committed, timeline.promoted)
    assert timeline.prefill_started is None  # that is P's to tell
    assert world.d.host.status().num_prompt_tokens_computed == 0
    check_nothing_is_left(world)


def test_without_a_prefill_node_it_does_all_itself(world: World) -> None:
    request = world.ask(prompt_of(40), 8)
    expected = expected_tokens(prompt_of(40), SamplingParams(max_tokens=8))
    world.give_d(request, prefill_endpoint=None, emitted=tuple(expected[:2]))
    world.go_on(20)
    deltas = world.told(world.d, request)
    assert deltas[0].position == 2
    assert [token for delta in deltas for token in delta.token_ids] == expected[2:]
    timeline = deltas[-1].timeline
    assert timeline is not None
    assert None not in (timeline.prefill_started, timeline.prefill_finished)
    assert timeline.promoted is None
    assert world.network.mail == []
    check_nothing_is_left(world)


def test_the_second_token_is_the_last(world: World) -> None:
    request = world.ask(prompt_of(40), 2)
    world.give_p(request)
    world.give_d(request)
    world.go_on(20)
    assert answer_of(world, request) == expected_tokens(prompt_of(40), request.sampling)
    check_nothing_is_left(world)


def test_what_d_had_to_give_up_is_computed_again(world: World) -> None:
    """Two requests outgrow the pool: one of them starts over here, and P has nothing to do."""
    requests = [world.ask(prompt_of(60, seed), 20) for seed in range(2)]
    for request in requests:
        world.give_p(request)
        world.give_d(request)
    world.go_on(120)
    assert world.d.scheduler.stats.num_preemptions > 0
    assert world.p.connector.counts().committed == 2
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, request.sampling)
        assert answer_of(world, request) == expected
    check_nothing_is_left(world)


# ---------------------------------------------------------------------- unhappy ends


def test_a_prefill_that_never_starts(world: World) -> None:
    request = world.ask(prompt_of(40), 8)
    world.give_d(request)
    world.go_on()
    world.now += CONFIG.reserve_timeout_s + 1
    world.go_on(3)
    (delta,) = world.told(world.d, request)
    assert delta.failure is not None
    assert (delta.failure.label, delta.failure.retryable) == ("transfer_failed", True)
    assert "deadline" in delta.failure.message
    check_nothing_is_left(world)


def test_a_damaged_block_fails_the_attempt(world: World) -> None:
    request = world.ask(prompt_of(40), 8)
    world.give_p(request)
    world.give_d(request)
    while world.p.connector.counts().blocks < 3:
        world.go_on()
    (sink,) = world.d.connector.sinks.values()
    assert sink.state is HandoffState.PUSHING  # the commit is on its way
    world.d.runner.pool[sink.block_ids[1], 0, 0, 3] ^= 1
    world.go_on(3)
    (delta,) = world.told(world.d, request)
    assert delta.failure is not None
    assert "checksum" in delta.failure.message
    assert delta.token_ids == ()
    check_nothing_is_left(world)


@pytest.mark.parametrize("reserve", ["on_start", "on_arrival"])
@pytest.mark.parametrize("rounds", range(10))
def test_a_cancelled_job_is_never_heard_of_again(reserve: str, rounds: int) -> None:
    """Wherever it is: in the intake, waiting for blocks, parked, loaded, running."""
    world = World(reserve=reserve)  # type: ignore[arg-type]
    request = world.ask(prompt_of(60), 30)
    world.give_d(request)
    if rounds % 2:
        world.give_p(request)
    world.go_on(rounds, writes=rounds % 3 > 0)
    before = len(world.told(world.d, request))
    world.d.cancel(request.request_id)
    check_nothing_is_left(world)
    assert len(world.told(world.d, request)) == before


def test_blocks_of_an_aborted_load_are_in_quarantine() -> None:
    world = World(exact_fences=False)
    request = world.ask(prompt_of(40), 8)
    world.give_p(request)
    world.give_d(request)
    while not world.network.writes:
        world.go_on(writes=False)
    (write,) = world.network.writes
    write.go_on()
    world.cancel(request)
    world.go_on(5, writes=False)
    blocks = world.d.host.status().blocks
    assert (blocks.used, blocks.quarantined) == (0, 3)
    assert blocks.balanced
    assert not world.d.host.jobs
    world.go_on(3)
    blocks = world.d.host.status().blocks
    assert (blocks.used, blocks.quarantined) == (0, 0)
    check_nothing_is_left(world)
