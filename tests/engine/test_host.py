"""One engine, its thread, and callers that come, go, read slowly, or never."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

import engine.callers
import engine.host
from engine import EngineHost
from engine.outputs import OutputStream
from protocol import (
    CacheSnapshot,
    DecodeJob,
    NodeLost,
    OutputBatch,
    Overloaded,
    PromptTooLong,
    SamplingParams,
)
from router import PrefixIndex
from tests.engine.hosted_node import (
    CALLER,
    LONG,
    TIMEOUT_S,
    Node,
    close,
    deltas_of,
    tokens_of,
)
from tests.hash_model import expected_tokens, prompt_of

# ---------------------------------------------------------------------- jobs and their answers


async def test_each_job_is_answered_in_order(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    jobs = [node.submit(prompt_of(length, length)) for length in (1, 16, 40, 100, 200)]
    told = await deltas_of(stream, *jobs)
    for job in jobs:
        given = job.request
        deltas = told[given.request_id]
        assert tokens_of(deltas) == expected_tokens(given.prompt_token_ids, given.sampling)
        assert deltas[0].num_cached_tokens == 0
        timeline = deltas[-1].timeline
        assert timeline is not None
        assert timeline.prefill_queued is not None
    assert sorted(node.role.started) == sorted(str(job.ticket) for job in jobs)
    await node.round()
    node.check_at_rest()
    await close(stream)


async def test_emitted_tokens_are_not_told_again(node: Node) -> None:
    prompt = prompt_of(30)
    expected = expected_tokens(prompt, SamplingParams(max_tokens=8))
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt, 8, emitted=tuple(expected[:3]), attempt=2)
    deltas = (await deltas_of(stream, job))["r0"]
    assert deltas[0].position == 3
    assert {delta.attempt for delta in deltas} == {2}
    assert tokens_of(deltas) == expected[3:]
    await close(stream)


async def test_callers_hear_of_their_own_jobs(node: Node) -> None:
    streams = {name: node.host.outputs(name) for name in "ab"}
    jobs = {name: node.submit(prompt_of(20, seed), caller=name) for seed, name in enumerate("ab")}
    for name, stream in streams.items():
        told = await deltas_of(stream, jobs[name])
        assert list(told) == [jobs[name].request.request_id]
        await close(stream)


async def test_the_status_is_exact_after_a_job(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    prompt = prompt_of(50)
    await deltas_of(stream, node.submit(prompt, 8))
    await deltas_of(stream, node.submit([*prompt, *prompt_of(10, 1)], 4))
    await node.round()
    status = node.host.status()
    node.check_at_rest()
    assert (status.healthy, status.draining) == (True, False)
    assert status.num_generated_tokens == 12
    assert status.num_prefix_hits == 48
    assert status.num_prefix_queries == 110
    assert status.num_prompt_tokens_computed == 50 + 12
    assert status.num_steps == 12
    assert status.blocks.cached == 3 + 0  # whole blocks of tokens that are computed
    assert status.prefill_tokens_per_s > 0
    assert node.follower.statuses[-1] == status
    steps = [each.num_steps for each in node.follower.statuses]
    assert steps == sorted(steps)
    await close(stream)


async def test_a_job_counts_from_the_moment_that_it_is_taken(node: Node) -> None:
    await node.hold_step()
    node.submit(prompt_of(33))
    assert node.host._make_status().num_waiting == 1
    assert node.host._make_status().queued_tokens == 33
    node.let_go()


async def test_too_much(node: Node) -> None:
    with pytest.raises(PromptTooLong):
        node.submit(prompt_of(513))
    node.host._max_jobs = 2
    await node.hold_step()
    stream = node.host.outputs(CALLER)
    jobs = [node.submit(prompt_of(20, seed)) for seed in range(2)]
    with pytest.raises(Overloaded, match="2 requests already"):
        node.submit(prompt_of(20))
    node.let_go()
    await deltas_of(stream, *jobs)
    await node.round()
    job = node.submit(prompt_of(20))
    await deltas_of(stream, job)
    await close(stream)


# ---------------------------------------------------------------------- the thread


async def test_commands_run_in_order_and_never_in_the_middle_of_a_step(node: Node) -> None:
    ran: list[tuple[int, int]] = []
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), 100)

    def command(poster: int, number: int) -> None:
        assert threading.current_thread() is node.thread
        assert not node.runner.in_step.is_set()
        ran.append((poster, number))

    def post_many(poster: int) -> None:
        for number in range(200):
            node.host.post(partial(command, poster, number))

    posters = [threading.Thread(target=post_many, args=(poster,)) for poster in range(4)]
    for thread in posters:
        thread.start()
    for thread in posters:
        await asyncio.to_thread(thread.join)
    await deltas_of(stream, job)
    await node.round()
    for poster in range(4):
        assert [number for who, number in ran if who == poster] == list(range(200))
    await close(stream)


async def test_jobs_from_many_threads(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    jobs: list[DecodeJob] = []

    def submit_some(seed: int) -> None:
        jobs.extend(node.submit(prompt_of(5, 10 * seed + n), 2) for n in range(5))

    await asyncio.gather(*(asyncio.to_thread(submit_some, seed) for seed in range(6)))
    told = await deltas_of(stream, *jobs)
    assert len(told) == 30
    await close(stream)


async def test_an_idle_engine_sleeps(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = node.host.outputs(CALLER)
    await deltas_of(stream, node.submit(prompt_of(20)))
    await node.round()
    rounds = node.runner.num_steps
    await asyncio.sleep(0.2)
    assert node.runner.num_steps - rounds <= 1
    monkeypatch.setattr(engine.host, "HEARTBEAT_S", 0.01)
    node.host.wake()
    heard = len(node.follower.statuses)
    async with asyncio.timeout(TIMEOUT_S):
        while len(node.follower.statuses) < heard + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await close(stream)


# ---------------------------------------------------------------------- cancelling


async def test_a_job_that_is_cancelled_before_it_is_accepted(node: Node) -> None:
    await node.hold_step()
    job = node.submit(prompt_of(20))
    node.cancel(job)
    node.let_go()
    await node.round()
    assert node.runner.computed == set()
    assert node.role.cancelled == [str(job.ticket)]
    node.check_at_rest()


async def test_a_job_that_is_cancelled_while_it_is_computed(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    jobs = [node.submit(prompt_of(20, seed), LONG) for seed in range(2)]
    first = await anext(stream)
    assert first.deltas
    node.cancel(jobs[0])
    await node.round()
    assert {job.job.request.request_id for job in node.host.jobs.values()} == {"r1"}
    node.cancel(jobs[1])
    node.cancel(jobs[1])
    await node.round()
    node.check_at_rest()
    await close(stream)


async def test_cancelling_means_all_attempts(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), LONG)
    again = DecodeJob(request=job.request, caller=CALLER, attempt=1)
    node.host.submit(again, node.role)
    await node.round()
    assert len(node.host.jobs) == 2
    node.cancel(job)
    await node.round()
    node.check_at_rest()
    await close(stream)


# ---------------------------------------------------------------------- callers


async def test_a_caller_that_leaves_takes_its_jobs_along(node: Node) -> None:
    leaving, staying = node.host.outputs("leaving"), node.host.outputs("staying")
    node.submit(prompt_of(20), LONG, caller="leaving")
    job = node.submit(prompt_of(30), 30, caller="staying")
    await anext(leaving)
    await close(leaving)
    told = await deltas_of(staying, job)
    assert len(tokens_of(told["r1"])) == 30
    await node.round()
    node.check_at_rest()
    assert list(node.host._callers._streams) == ["staying"]
    await close(staying)
    await node.round()
    assert node.host._callers._streams == {}


async def test_nobody_listens(node: Node) -> None:
    node.submit(prompt_of(20), LONG, caller="nobody")
    await node.round()
    async with asyncio.timeout(TIMEOUT_S):
        while node.host.jobs:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await node.round()
    node.check_at_rest()
    assert node.scheduler.stats.generated == 1


async def test_a_caller_that_never_reads(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for it is bounded; when it reads after all, its stream tells that it ended."""
    monkeypatch.setattr(engine.callers, "OutputStream", partial(OutputStream, max_batches=5))
    stream = node.host.outputs(CALLER)
    node.submit(prompt_of(20), LONG)
    async with asyncio.timeout(TIMEOUT_S):
        while CALLER in node.host._callers._streams:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await node.round()
    node.check_at_rest()
    batches = [batch async for batch in stream]
    assert len(batches) == 5
    # A fresh stream works, and hears nothing of the past.
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20, seed=1), 3)
    assert list(await deltas_of(stream, job)) == ["r1"]
    await close(stream)


async def test_a_caller_that_comes_back(node: Node) -> None:
    """Its second stream ends the first, and has what comes from then on."""
    first = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), 200)
    seen = [*(await anext(first)).deltas]
    await node.hold_step()
    second = node.host.outputs(CALLER)
    node.let_go()
    seen += [delta async for batch in first for delta in batch.deltas]  # ends by itself
    seen += (await deltas_of(second, job))["r0"]
    assert tokens_of(seen) == expected_tokens(job.request.prompt_token_ids, job.request.sampling)
    await close(first)
    await node.round()
    assert list(node.host._callers._streams) == [CALLER]
    await close(second)


async def test_a_caller_that_is_back_before_the_engine_has_noticed(node: Node) -> None:
    first = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), 100)
    await anext(first)
    await node.hold_step()
    await close(first)
    second = node.host.outputs(CALLER)
    node.let_go()
    assert "r0" in await deltas_of(second, job)
    await close(second)


def test_a_caller_whose_event_loop_is_gone(node: Node) -> None:
    async def come_and_go() -> AsyncIterator[OutputBatch]:
        stream = node.host.outputs("gone")
        node.submit(prompt_of(20), LONG, caller="gone")
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(come_and_go())
    loop.close()
    asyncio.run(_until_idle(node))
    node.check_at_rest()
    assert node.host._callers._streams == {}
    assert node.thread.is_alive()
    del stream


async def _until_idle(node: Node) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while node.host.jobs:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await node.round()


# ---------------------------------------------------------------------- the end


class Crash:
    """What the thread's exception hook was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[BaseException | None] = []
        hook = lambda args: self.errors.append(args.exc_value)  # noqa: E731
        monkeypatch.setattr(threading, "excepthook", hook)


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Crash:
    return Crash(monkeypatch)


async def test_a_step_that_breaks(node: Node, crash: Crash) -> None:
    stream, idle = node.host.outputs(CALLER), node.host.outputs("idle")
    node.submit(prompt_of(20), LONG)
    await anext(stream)
    assert node.host.status().healthy
    node.runner.breaks = True
    told = [delta async for batch in stream for delta in batch.deltas]  # ends by itself
    assert not any(delta.finish_reason for delta in told)
    assert [batch async for batch in idle] == []
    await asyncio.to_thread(node.thread.join, TIMEOUT_S)
    assert not node.thread.is_alive()
    (error,) = crash.errors
    assert isinstance(error, ZeroDivisionError)
    assert not node.host.status().healthy
    assert not node.follower.statuses[-1].healthy  # so that routers look elsewhere
    with pytest.raises(NodeLost, match="node node is down"):
        node.submit(prompt_of(20))
    with pytest.raises(NodeLost):
        await node.host.snapshot()
    await asyncio.wait_for(node.host.drain(), TIMEOUT_S)
    assert [batch async for batch in node.host.outputs("late")] == []
    node.host.stop()


def broken() -> None:
    raise ZeroDivisionError


async def test_a_command_that_breaks(node: Node, crash: Crash) -> None:
    stream = node.host.outputs(CALLER)
    node.host.post(broken)
    assert [batch async for batch in stream] == []
    await asyncio.to_thread(node.thread.join, TIMEOUT_S)
    assert isinstance(crash.errors[0], ZeroDivisionError)
    assert not node.host.status().healthy


async def test_a_crash_ends_whoever_waits(node: Node, crash: Crash) -> None:
    stream = node.host.outputs(CALLER)
    node.submit(prompt_of(20), LONG)
    await anext(stream)
    draining = asyncio.create_task(node.host.drain())
    await node.round()
    assert not draining.done()
    node.runner.breaks = True
    await asyncio.wait_for(draining, TIMEOUT_S)
    await asyncio.to_thread(node.thread.join, TIMEOUT_S)
    assert len(crash.errors) == 1


@pytest.mark.parametrize("pending", [False, True])
async def test_stop_while_a_step_runs(node: Node, pending: bool) -> None:
    """The step ends, nothing else begins."""
    stream = node.host.outputs(CALLER)
    node.submit(prompt_of(20), LONG)
    await anext(stream)
    await node.hold_step()
    if pending:
        node.submit(prompt_of(30), LONG)
    steps = node.runner.num_steps
    stopping = asyncio.create_task(asyncio.to_thread(node.host.stop))
    async with asyncio.timeout(TIMEOUT_S):
        while not node.host._stopping:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    with pytest.raises(NodeLost):
        node.submit(prompt_of(20))
    assert [batch async for batch in node.host.outputs("late")] == []
    assert not stopping.done()
    node.let_go()
    await asyncio.wait_for(stopping, TIMEOUT_S)
    assert node.runner.num_steps == steps
    assert not node.thread.is_alive()
    async for _ in stream:
        pass
    assert not node.follower.statuses[-1].healthy
    node.host.stop()


def test_stop_before_anything_happened() -> None:
    node = Node()
    node.host.start(node.role)
    node.host.stop()
    assert not node.thread.is_alive()
    assert not node.host.status().healthy


# ---------------------------------------------------------------------- drain and snapshot


@pytest.mark.parametrize("wait", [EngineHost.drain, EngineHost.snapshot])
def test_whoever_waits_goes_away_with_its_event_loop(
    node: Node, wait: Callable[[EngineHost], Coroutine[Any, Any, object]]
) -> None:
    """The answer finds nobody, which must not hurt the node."""
    complaints: list[object] = []

    async def come_and_go() -> None:
        await node.hold_step()
        waiting = asyncio.create_task(wait(node.host))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    async def stay() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        await come_and_go()
        node.let_go()
        await node.round()
        await asyncio.sleep(0)

    asyncio.run(come_and_go())
    node.let_go()
    asyncio.run(stay())
    assert node.thread.is_alive()
    assert complaints == []


async def test_a_snapshot_and_the_events_behind_it_are_what_is_cached(node: Node) -> None:
    """Whenever it is taken, and however many blocks come and go: a router gets the same picture."""
    chance = random.Random(1)
    prefixes = [prompt_of(length, length) for length in (16, 48, 160)]
    stream = node.host.outputs(CALLER)
    snapshots: list[CacheSnapshot] = []

    async def take_some() -> None:
        while not done.is_set():
            snapshots.append(await node.host.snapshot())
            await asyncio.sleep(0.002)

    done = asyncio.Event()
    taking = asyncio.create_task(take_some())
    for _ in range(12):
        jobs = [
            node.submit([*chance.choice(prefixes), *prompt_of(chance.randint(1, 150), seed)], 4)
            for seed in (chance.randrange(1000) for _ in range(4))
        ]
        await deltas_of(stream, *jobs)
    done.set()
    await taking
    await node.round()
    cached = dict(node.scheduler.kv.pool.cached_chain())
    batches = list(node.follower.batches)
    assert [batch.sequence for batch in batches] == list(range(1, len(batches) + 1))
    assert len({snapshot.sequence for snapshot in snapshots}) > 3
    assert any(len(batch.events) > 1 for batch in batches)
    for snapshot in [*snapshots[:1], *chance.sample(snapshots, 3), *snapshots[-1:]]:
        index = PrefixIndex(max_entries=100_000)
        index.add_node(node.info)
        index.apply_snapshot(snapshot)
        for batch in batches:
            index.apply(batch)
        index.check_integrity()
        assert index.needs_snapshot() == frozenset()
        chains = index._holders["node"].chains
        assert chains._parents == cached
    await close(stream)


async def test_a_snapshot_while_a_step_runs(node: Node) -> None:
    await node.hold_step()
    taking = asyncio.create_task(node.host.snapshot())
    await asyncio.sleep(0)
    assert not taking.done()
    node.let_go()
    snapshot = await asyncio.wait_for(taking, TIMEOUT_S)
    assert snapshot.hashes == snapshot.parents == ()
