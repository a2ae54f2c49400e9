"""P is lost before the commit: D keeps its place in the queue, its blocks and its hits."""

from __future__ import annotations

import pytest

from kv_transfer import HandoffState
from protocol import GenerationRequest
from scheduler import RequestStatus
from tests.hash_model import expected_tokens, prompt_of
from tests.kv_transfer.handoff_world import CONFIG, NOWHERE, World


def check_nothing_is_left(world: World) -> None:
    world.calm_down()
    for node in (world.d, *world.prefill):
        node.check_nothing_is_left()


def push_begins(world: World, request: GenerationRequest) -> None:
    """Until the first block is on its way."""
    world.give_p(request)
    world.give_d(request)
    while not world.network.writes:
        world.go_on(writes=False)
    world.network.writes[0].go_on()
    world.go_on(writes=False)


def next_attempt(world: World, request: GenerationRequest, attempt: int = 1) -> None:
    """With `q`, as a dispatcher makes it: behind what the client has. D hears nothing before."""
    q, emitted = world.prefill[-1], world.emitted(request)
    world.give_p(request, q, attempt=attempt, emitted=emitted)
    world.give_d(request, attempt=attempt, emitted=emitted, prefill_endpoint=q.transport.endpoint)


def blocks_of(world: World, key: str) -> list[int]:
    return list(world.d.scheduler.requests[key].block_ids)


@pytest.mark.parametrize("told", [False, True])
def test_p_dies_while_it_pushes_and_d_keeps_its_blocks(told: bool) -> None:
    """Also if its first token was told: that is what D goes on from."""
    world = World(exact_fences=False, spare=True)
    first = world.ask(prompt_of(16), 4)  # leaves a block in D's cache
    world.give_p(first)
    world.give_d(first)
    world.go_on(20)
    prompt = [*prompt_of(16), *prompt_of(64, 1)]
    request = world.ask(prompt, 4)
    if told:
        push_begins(world, request)
        while not world.emitted(request):
            world.p.round()
    else:
        push_begins(world, request)
    before = blocks_of(world, "r1/0")
    assert len(before) == 5
    free = world.d.scheduler.block_counts().free
    world.kill(world.p)
    for _ in range(3):
        world.d.round()
    (failure,) = [delta.failure for delta in world.told(world.d, request)]
    assert failure is not None
    assert failure.retryable
    assert "peer_lost" in failure.message
    assert blocks_of(world, "r1/0") == before  # and nobody else had them for a moment:
    assert world.d.scheduler.block_counts().free == free
    next_attempt(world, request)
    world.d.round()
    (sink,) = world.d.connector.sinks.values()
    assert (sink.request_id, str(sink.ticket)) == ("r1/0", "r1/1")
    assert blocks_of(world, "r1/0") == before
    prefix_hit = world.d.scheduler.requests["r1/0"].num_cached_tokens
    assert prefix_hit == 16
    world.go_on(30)
    assert list(world.emitted(request)) == expected_tokens(prompt, request.sampling)
    assert world.d.connector.counts().retargeted == {"kept": 1}
    last = world.told(world.d, request)[-1]
    assert last.attempt == 1
    assert last.timeline is not None
    assert last.timeline.reserved is not None
    assert world.d.scheduler.stats.prompt_loaded == 15 + 1 + 64  # each once; not again
    assert world.d.host.status().num_prompt_tokens_computed == 0
    check_nothing_is_left(world)


def test_the_order_of_those_who_wait_stays() -> None:
    """Of three that are parked or wait for room, the first loses its P: it stays the first."""
    world = World(spare=True)
    running = world.ask(prompt_of(10, 9), 30)  # leaves room for two
    world.give_d(running, prefill_endpoint=None)
    requests = [world.ask(prompt_of(40, seed), 3) for seed in range(3)]
    for request in requests:
        world.give_p(request)
        world.give_d(request)
    for _ in range(9):
        world.go_on(writes=False)

    def order() -> list[str]:
        scheduler = world.d.scheduler
        return [r.request_id for q in (scheduler.skipped_waiting, scheduler.waiting) for r in q]

    before = order()
    assert len(before) == 3
    assert [bool(blocks_of(world, key)) for key in before].count(False) == 1
    world.kill(world.p)
    for _ in range(2):
        world.d.round()
    for request in requests:
        next_attempt(world, request)
    world.d.round()
    assert order() == before
    world.go_on(120)
    assert world.d.connector.counts().retargeted == {"kept": 2, "queued": 1}
    for request in (running, *requests):
        expected = expected_tokens(request.prompt_token_ids, request.sampling)
        assert list(world.emitted(request)) == expected
    check_nothing_is_left(world)


def test_without_proof_it_starts_over_in_other_blocks() -> None:
    """P hangs, and might wake up and write."""
    world = World(exact_fences=False, spare=True)
    request = world.ask(prompt_of(60), 4)
    push_begins(world, request)
    before = blocks_of(world, "r0/0")
    world.network.cut(world.p.transport, world.d.transport)
    world.d.round()
    next_attempt(world, request)
    for _ in range(2):
        world.d.round()
    assert world.d.connector.counts().retargeted == {"given_up": 1}
    world.prefill[-1].round()
    for _ in range(2):
        while world.network.mail:
            world.network.deliver()
        world.d.round()
    blocks = world.d.host.status().blocks
    assert (blocks.quarantined, blocks.used) == (4, 4)
    assert not set(blocks_of(world, "r0/1")) & set(before)
    for write in world.network.writes:
        write.go_on()  # into the old ones
    world.go_on(30)
    assert list(world.emitted(request)) == expected_tokens(prompt_of(60), request.sampling)
    check_nothing_is_left(world)


def test_nobody_comes_for_what_is_kept() -> None:
    world = World(spare=True)
    request = world.ask(prompt_of(60), 4)
    push_begins(world, request)
    world.kill(world.p)
    world.d.round()
    assert world.d.host.status().blocks.used == 4
    world.now += CONFIG.transfer_timeout_s + 1
    for _ in range(3):
        world.d.round()
    assert world.d.host.status().blocks.used == 0
    assert not world.d.host.jobs
    assert len(world.told(world.d, request)) == 1  # of the loss; no more is to be said
    check_nothing_is_left(world)


@pytest.mark.parametrize("rounds", range(4))
def test_the_client_leaves_while_another_p_is_looked_for(rounds: int) -> None:
    world = World(spare=True)
    request = world.ask(prompt_of(60), 4)
    push_begins(world, request)
    world.kill(world.p)
    world.d.round()
    if rounds:
        next_attempt(world, request)
    world.go_on(rounds, writes=False)
    world.cancel(request)
    before = len(world.told(world.d, request))
    check_nothing_is_left(world)
    assert len(world.told(world.d, request)) == before


def test_an_older_request_gets_the_blocks_that_are_kept() -> None:
    world = World(spare=True, reserve="on_arrival")
    old, young = world.ask(prompt_of(90, 1), 3), world.ask(prompt_of(100, 2), 3)
    push_begins(world, young)
    world.kill(world.p)
    world.d.round()
    world.give_d(old, prefill_endpoint=None)
    for _ in range(3):
        world.d.round()
    assert world.d.scheduler.stats.num_revoked_reservations == 1
    assert world.d.scheduler.requests["r1/0"].status is RequestStatus.WAITING
    next_attempt(world, young)
    world.go_on(80)
    assert world.d.connector.counts().retargeted == {"queued": 1}
    for request in (old, young):
        expected = expected_tokens(request.prompt_token_ids, request.sampling)
        assert list(world.emitted(request)) == expected
    check_nothing_is_left(world)


def test_the_next_p_is_nowhere() -> None:
    """D tells, and waits for a third."""
    world = World(spare=True)
    request = world.ask(prompt_of(60), 4)
    push_begins(world, request)
    before = blocks_of(world, "r0/0")
    world.kill(world.p)
    for _ in range(2):
        world.d.round()
    world.give_d(request, attempt=1, prefill_endpoint=NOWHERE)
    world.d.round()
    assert [d.attempt for d in world.told(world.d, request) if d.failure] == [0, 1]
    next_attempt(world, request, attempt=2)
    world.d.round()
    assert blocks_of(world, "r0/0") == before
    world.go_on(30)
    assert list(world.emitted(request)) == expected_tokens(prompt_of(60), request.sampling)
    check_nothing_is_left(world)


def test_an_attempt_after_the_commit_starts_over() -> None:
    """D decodes already, and nobody has heard of it: the next attempt is another request."""
    world = World(spare=True)
    request = world.ask(prompt_of(60), 30)
    world.give_p(request)
    world.give_d(request)
    while not world.told(world.d, request):
        world.go_on()
    world.kill(world.p)
    next_attempt(world, request)
    world.d.round()
    assert "r0/0" not in world.d.host.jobs
    world.go_on(60)
    assert world.d.connector.counts().retargeted == {}
    assert list(world.emitted(request)) == expected_tokens(prompt_of(60), request.sampling)
    check_nothing_is_left(world)


def test_an_attempt_that_d_computes_itself_takes_the_place_of_the_older_one() -> None:
    world = World(spare=True)
    request = world.ask(prompt_of(60), 4)
    push_begins(world, request)
    (sink,) = world.d.connector.sinks.values()
    assert sink.state is HandoffState.PUSHING
    world.kill(world.p)
    world.give_d(request, attempt=1, prefill_endpoint=None, emitted=world.emitted(request))
    world.go_on(30)
    assert list(world.emitted(request)) == expected_tokens(prompt_of(60), request.sampling)
    check_nothing_is_left(world)
