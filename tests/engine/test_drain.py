"""A node that drains: whom it refuses, whom it waits for, and whom it gives back when."""

from __future__ import annotations

import asyncio
import threading
import time

import msgspec
import pytest

import engine.host
from engine import RoleChange
from engine.drain import Drain
from protocol import (
    Delta,
    Failure,
    NodeDraining,
    NodeLost,
    Overloaded,
    PauseMode,
    Role,
    WrongRole,
)
from tests.engine.hosted_node import (
    CALLER,
    LONG,
    TIMEOUT_S,
    Node,
    PlainRole,
    close,
    deltas_of,
    tokens_of,
)
from tests.hash_cluster import until
from tests.hash_model import expected_tokens, prompt_of

DRAINING = Failure("draining", "node node is draining", retryable=True)


def check_given_back(deltas: list[Delta]) -> None:
    """Its last word says so, and nothing else does."""
    assert [delta.failure for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].failure == DRAINING
    assert deltas[-1].timeline is not None


async def test_new_jobs_are_refused_and_the_old_are_waited_for(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), 60)
    await node.hold_step()
    waiting = node.submit(prompt_of(30), 5)
    drains = [asyncio.create_task(node.host.drain()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(NodeDraining, match="node node is draining"):
        node.submit(prompt_of(20))
    node.let_go()
    told = await deltas_of(stream, job, waiting)
    assert {len(tokens_of(deltas)) for deltas in told.values()} == {60, 5}
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*drains)
    node.check_at_rest()
    assert node.host.status().draining
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain()  # of an idle node
    await close(stream)


async def test_the_last_job_is_cancelled(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), LONG)
    await anext(stream)
    draining = asyncio.create_task(node.host.drain())
    await node.round()
    assert not draining.done()
    node.cancel(job)
    async with asyncio.timeout(TIMEOUT_S):
        await draining
    await close(stream)


async def test_at_the_deadline_jobs_are_given_back_with_what_they_have(node: Node) -> None:
    """One that runs, one that waits for its seat, and one that was not even accepted."""
    stream = node.host.outputs(CALLER)
    running = [node.submit(prompt_of(20, seed), LONG) for seed in range(8)]
    waiting = node.submit(prompt_of(30), LONG)
    await until(lambda: node.host.status().num_running == 8)
    await node.hold_step()
    posted = node.submit(prompt_of(40), LONG)
    draining = asyncio.create_task(node.host.drain(0.0))
    await asyncio.sleep(0)
    node.let_go()
    told = await deltas_of(stream, *running, waiting, posted)
    async with asyncio.timeout(TIMEOUT_S):
        await draining
    node.check_at_rest()
    for job in (*running, waiting, posted):
        deltas = told[job.request.request_id]
        check_given_back(deltas)
        tokens = [token for delta in deltas for token in delta.token_ids]
        sampling = msgspec.structs.replace(job.request.sampling, max_tokens=len(tokens) + 1)
        expected = expected_tokens(job.request.prompt_token_ids, sampling)
        assert tokens == expected[:-1]
    assert sorted(node.role.given_back) == sorted(node.role.cancelled)
    assert len(node.role.given_back) == 10
    await close(stream)


async def test_the_earliest_deadline_counts(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), LONG)
    await anext(stream)
    forever = asyncio.create_task(node.host.drain())
    await asyncio.sleep(0)
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(node.host.drain(60.0), node.host.drain(0.0), node.host.drain(30.0))
        await forever
    check_given_back((await deltas_of(stream, job))["r0"])
    await close(stream)


async def test_a_deadline_wakes_a_node_that_does_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused one, whose jobs would stay where they are."""
    monkeypatch.setattr(engine.host, "HEARTBEAT_S", 1e9)
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), LONG)
    await anext(stream)
    await node.host.pause(PauseMode.KEEP)
    forever = asyncio.create_task(node.host.drain())
    await node.round()
    assert not forever.done()
    began = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain(0.05)
        await forever
    assert time.monotonic() - began >= 0.05
    check_given_back((await deltas_of(stream, job))["r0"])
    node.check_at_rest()
    await node.host.pause(None)
    await close(stream)


async def test_what_ends_soon_gets_a_moment_more(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.host, "HANDOFF_GRACE_S", TIMEOUT_S)
    stream = node.host.outputs(CALLER)
    quick, slow = node.submit(prompt_of(20), 100), node.submit(prompt_of(30), LONG)
    node.role.ending.add(str(quick.ticket))
    await until(lambda: node.host.status().num_running == 2)
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain(0.0)
    told = await deltas_of(stream, quick, slow)
    assert len(tokens_of(told["r0"])) == 100
    check_given_back(told["r1"])
    await close(stream)


async def test_but_not_more_than_that(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.host, "HANDOFF_GRACE_S", 0.0)
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), LONG)
    node.role.ending.add(str(job.ticket))
    await anext(stream)
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain(0.0)
    check_given_back((await deltas_of(stream, job))["r0"])
    await close(stream)


async def test_hand_offs_are_waited_for_but_with_a_deadline_not_for_ever(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.host, "HANDOFF_GRACE_S", 0.05)
    monkeypatch.setattr("engine.drain.HANDOFF_GRACE_S", 0.05)
    node.role.num_transfers = 1
    draining = asyncio.create_task(node.host.drain())
    await node.round()
    assert not draining.done()
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain(0.0)
        await draining
    await node.host.undrain()
    draining = asyncio.create_task(node.host.drain())
    await node.round()
    assert not draining.done()
    node.role.num_transfers = 0
    node.host.wake()
    async with asyncio.timeout(TIMEOUT_S):
        await draining


async def test_undrain(node: Node) -> None:
    """Whoever waits is let go, and the deadline of before means nothing to later jobs."""
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), LONG)
    await anext(stream)
    drains = [asyncio.create_task(node.host.drain(timeout)) for timeout in (None, 0.2)]
    await node.round()
    await node.host.undrain()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*drains)
    assert not node.host.status().draining
    assert len(node.host.jobs) == 1
    await asyncio.sleep(0.3)  # past the deadline
    other = node.submit(prompt_of(30), 5)
    assert len(tokens_of((await deltas_of(stream, other))["r1"])) == 5
    node.cancel(job)
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain(0.0)
        await node.host.undrain()
        last = node.submit(prompt_of(10), 3)
        assert len(tokens_of((await deltas_of(stream, last))["r2"])) == 3
    await close(stream)


async def test_a_job_that_is_late_is_not_taken_by_a_drained_node(node: Node) -> None:
    """Its caller asked just before the drain, and it comes to the engine's thread behind it."""
    stream = node.host.outputs(CALLER)
    accept = node.host._accept
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain()
    late = node.make_job(prompt_of(20))
    node.host._pending[str(late.ticket)] = 20
    node.host.post(lambda: accept(late, node.role))
    (delta,) = (await deltas_of(stream, late))["r0"]
    check_given_back([delta])
    await node.round()
    node.check_at_rest()
    await close(stream)


async def test_a_drain_that_nobody_waits_for_any_more_goes_on(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    node.submit(prompt_of(20), LONG)
    await anext(stream)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await node.host.drain(60.0)
    with pytest.raises(NodeDraining):
        node.submit(prompt_of(20))
    assert node.host._drain._waiters == set()
    await close(stream)


# ---------------------------------------------------------------------- another role


def change_of(node: Node, role: Role, generation: int = 1) -> RoleChange:
    info = msgspec.structs.replace(node.info, role=role, generation=generation)
    return RoleChange(info, PlainRole(node.host), node.scheduler.config)


async def test_a_role_begins_when_the_last_job_of_the_old_one_has_ended(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(64), 60)
    await until(lambda: node.host.status().num_running == 1)
    change = change_of(node, Role.DECODE)
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.change_role(change)
    assert len(tokens_of((await deltas_of(stream, job))["r0"])) == 60
    status = node.host.status()
    assert (status.role, status.draining) == (Role.DECODE, False)
    assert node.host.info is change.info
    # What was taken for the old role, before the change was known, is for nobody here.
    late = node.submit(prompt_of(64), 5)
    (delta,) = (await deltas_of(stream, late))["r1"]
    assert delta.failure is not None
    assert (delta.failure.label, delta.failure.retryable) == (WrongRole.label, True)
    node.role = node.host.role  # type: ignore[assignment]
    hit = node.submit(prompt_of(64), 5)
    deltas = (await deltas_of(stream, hit))["r2"]
    assert tokens_of(deltas) == expected_tokens(prompt_of(64), hit.request.sampling)
    assert deltas[0].num_cached_tokens == 48
    await node.round()
    node.check_at_rest()
    await close(stream)


async def test_numbers_of_block_events_go_on(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    await deltas_of(stream, node.submit(prompt_of(64), 20))
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.change_role(change_of(node, Role.DECODE))
    node.role = node.host.role  # type: ignore[assignment]
    await deltas_of(stream, node.submit(prompt_of(65), 20))
    await node.round()
    sequences = [batch.sequence for batch in node.follower.batches]
    assert sequences == list(range(1, len(sequences) + 1))
    snapshot = await node.host.snapshot()
    assert snapshot.sequence == sequences[-1]
    await close(stream)


async def test_of_two_changes_one_is_made(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), 60)
    await anext(stream)
    changes = [change_of(node, role) for role in (Role.PREFILL, Role.DECODE)]
    async with asyncio.timeout(TIMEOUT_S):
        results = await asyncio.gather(*map(node.host.change_role, changes), return_exceptions=True)
    assert [isinstance(result, Overloaded) for result in results].count(True) == 1
    assert node.host.info is changes[results.index(None)].info
    assert node.host._drain.taking
    await deltas_of(stream, job)
    await close(stream)


async def test_a_change_that_is_called_off(node: Node) -> None:
    stream = node.host.outputs(CALLER)
    job = node.submit(prompt_of(20), LONG)
    await anext(stream)
    changing = asyncio.create_task(node.host.change_role(change_of(node, Role.DECODE)))
    await node.round()
    await node.host.undrain()
    with pytest.raises(Overloaded, match="before it could become a decode node"):
        await changing
    assert node.host.info is node.info
    changing = asyncio.create_task(node.host.change_role(change_of(node, Role.DECODE)))
    await node.round()
    changing.cancel()
    await asyncio.gather(changing, return_exceptions=True)
    assert node.host._drain.taking  # as it did before
    node.cancel(job)
    await node.round()
    assert node.host.info is node.info
    await close(stream)


async def test_a_node_that_drained_before_takes_jobs_in_its_new_role(node: Node) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain(0.0)
        await node.host.change_role(change_of(node, Role.DECODE))
    assert node.host._drain.taking


# ---------------------------------------------------------------------- a node that ends


@pytest.mark.parametrize("timeout_s", [None, 0.0])
async def test_stop_lets_whoever_waits_go(node: Node, timeout_s: float | None) -> None:
    stream = node.host.outputs(CALLER)
    node.submit(prompt_of(20), LONG)
    await anext(stream)
    await node.hold_step()
    waiting = [
        asyncio.create_task(node.host.drain(timeout_s)),
        asyncio.create_task(node.host.change_role(change_of(node, Role.DECODE))),
    ]
    await asyncio.sleep(0)
    node.host.ask_stop()
    node.let_go()
    async with asyncio.timeout(TIMEOUT_S):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], NodeLost)
    async with asyncio.timeout(TIMEOUT_S):
        await node.host.drain()
    await close(stream)


async def test_questions_to_a_thread_that_dies_are_answered_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    node.submit(prompt_of(20), LONG)
    await node.hold_step()
    node.runner.breaks = True
    asking = [
        asyncio.create_task(node.host.snapshot()),
        asyncio.create_task(node.host.pause(PauseMode.WAIT)),
    ]
    await asyncio.sleep(0)
    node.let_go()
    began = time.monotonic()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(result, NodeLost) for result in results)
    assert time.monotonic() - began < TIMEOUT_S
    with pytest.raises(NodeLost):
        await node.host.snapshot()


# ---------------------------------------------------------------------- the automaton


def test_the_states() -> None:
    drain, released = Drain(), []
    drain.note_empty()
    assert (drain.taking, drain.drained) == (True, False)
    drain.begin(5.0)
    drain.begin(None)
    drain.wait(lambda: released.append(1))
    assert (drain.taking, drain.drained, released) == (False, False, [])
    assert [drain.is_overdue(now) for now in (4.9, 5.0)] == [False, True]
    assert drain.is_overdue(5.0, grace_s=1.0) is False
    assert [drain.next_time(now) for now in (4.0, 5.0, 7.0)] == [5.0, 7.0, None]
    drain.note_empty()
    assert (drain.drained, released) == (True, [1])
    drain.begin(9.0)
    assert drain.drained  # what is empty stays empty
    drain.end()
    assert (drain.taking, drain.next_time(0.0), released) == (True, None, [1])
