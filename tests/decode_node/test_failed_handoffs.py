"""What becomes of a request whose KV does not come: `on_transfer_failure`, on D's side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_transfer import OnTransferFailure
from protocol import Failure, FinishReason, GenerationRequest
from tests.hash_model import expected_tokens, prompt_of
from tests.kv_transfer.handoff_world import CONFIG, World


def check_nothing_is_left(world: World) -> None:
    world.calm_down()
    world.p.check_nothing_is_left()
    world.d.check_nothing_is_left()


def failures_of(world: World, request: GenerationRequest) -> list[Failure]:
    told = [*world.told(world.p, request), *world.told(world.d, request)]
    return [delta.failure for delta in told if delta.failure is not None]


def tokens_of(world: World, request: GenerationRequest) -> list[int]:
    """By position: D may tell the first token once more, and it must be the same."""
    told: dict[int, int] = {}
    for delta in (*world.told(world.p, request), *world.told(world.d, request)):
        for number, token in enumerate(delta.token_ids, delta.position):
            assert told.setdefault(number, token) == token
    assert sorted(told) == list(range(len(told)))
    return [told[position] for position in sorted(told)]


# ---------------------------------------------------------------------- how it fails


def damage(world: World, request: GenerationRequest) -> None:
    """P does not know, and believes that all is well."""
    world.give_p(request)
    world.give_d(request)
    while world.p.connector.counts().blocks < 3:
        world.go_on()
    (sink,) = world.d.connector.sinks.values()
    world.d.runner.pool[sink.block_ids[1], 0, 0, 3] ^= 1


def fail_the_write(world: World, request: GenerationRequest) -> None:
    world.give_p(request)
    world.give_d(request)
    while not world.network.writes:
        world.go_on(writes=False)
    world.network.writes[0].fail()


def never_start(world: World, request: GenerationRequest) -> None:
    world.give_d(request)
    world.go_on()
    world.now += CONFIG.reserve_timeout_s + 1


HOW = [damage, fail_the_write, never_start]


@pytest.mark.parametrize("how", HOW)
def test_d_computes_the_prompt_itself(how: Callable[[World, GenerationRequest], None]) -> None:
    world = World(on_transfer_failure="recompute")
    request = world.ask(prompt_of(40), 8)
    how(world, request)
    world.go_on(30)
    assert failures_of(world, request) == []
    assert tokens_of(world, request) == expected_tokens(prompt_of(40), request.sampling)
    last = world.told(world.d, request)[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.timeline is not None
    assert None not in (last.timeline.prefill_started, last.timeline.prefill_finished)
    assert world.d.connector.counts().outcomes == {"recompute": 1}
    assert world.d.host.status().num_prompt_tokens_computed >= 40
    check_nothing_is_left(world)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("configured", "retryable"), [("retry", True), ("fail", False)])
def test_d_tells_whether_there_may_be_another_attempt(
    how: Callable[[World, GenerationRequest], None], configured: OnTransferFailure, retryable: bool
) -> None:
    world = World(on_transfer_failure=configured)
    request = world.ask(prompt_of(40), 8)
    how(world, request)
    world.go_on(5)
    failures = failures_of(world, request)
    assert failures
    assert {(f.label, f.retryable) for f in failures} == {("transfer_failed", retryable)}
    assert world.told(world.d, request)[-1].failure is not None
    assert world.d.connector.counts().outcomes == {configured: 1}
    check_nothing_is_left(world)


def test_the_old_blocks_are_in_quarantine_while_it_computes() -> None:
    """P may still write to them, so it computes into others."""
    world = World(exact_fences=False, on_transfer_failure="recompute")
    request = world.ask(prompt_of(40), 30)
    world.give_p(request)
    world.give_d(request)
    while not world.network.writes:
        world.go_on(writes=False)
    (write,) = world.network.writes
    write.go_on()
    world.go_on(writes=False)
    world.now += CONFIG.transfer_timeout_s + 1  # P says nothing: its messages are late
    for _ in range(4):
        world.d.round()
    blocks = world.d.host.status().blocks
    assert (blocks.used, blocks.quarantined) == (3, 3)
    assert blocks.balanced
    world.go_on(60)
    assert failures_of(world, request) == []
    assert tokens_of(world, request) == expected_tokens(prompt_of(40), request.sampling)
    assert world.d.host.status().blocks.quarantined == 0
    check_nothing_is_left(world)


@pytest.mark.parametrize("rounds", range(5))
def test_a_request_that_is_cancelled_while_it_is_computed_again(rounds: int) -> None:
    world = World(on_transfer_failure="recompute")
    request = world.ask(prompt_of(60), 30)
    fail_the_write(world, request)
    world.go_on(1 + rounds)
    before = len(world.told(world.d, request))
    world.cancel(request)
    check_nothing_is_left(world)
    assert len(world.told(world.d, request)) == before


def test_the_first_token_that_ends_the_request_is_no_failure() -> None:
    world = World(on_transfer_failure="recompute")
    prompt = prompt_of(40)
    request = world.ask(prompt, 8)
    (stop, *_) = expected_tokens(prompt, request.sampling)
    request = world.ask(prompt, 8, stop_token_ids=(stop,))
    world.give_p(request)
    world.give_d(request)
    world.go_on(20)
    assert world.told(world.d, request) == []
    assert world.d.connector.counts().outcomes == {}
    check_nothing_is_left(world)
