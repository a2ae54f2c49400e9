"""A node that is paused, or that forgets its cache, in the middle of its work."""

from __future__ import annotations

import asyncio

import pytest

from protocol import NodeLost, PauseMode, RequestAborted, SamplingParams
from tests.hash_cluster import HashCluster, read, until
from tests.hash_model import expected_tokens, prompt_of

SAMPLING = SamplingParams(max_tokens=40)
BOTH = pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
SHAPES = pytest.mark.parametrize("unified", [True, False], ids=["unified", "disaggregated"])


@BOTH
@SHAPES
async def test_nothing_is_computed_until_it_goes_on(unified: bool, async_scheduling: bool) -> None:
    cluster = HashCluster(unified=unified, async_scheduling=async_scheduling, step_s=0.002)
    prompts = [prompt_of(50, seed) for seed in range(4)]
    async with cluster.running():
        dispatcher = cluster.local.dispatcher
        streams = [await cluster.submit(prompt, SAMPLING) for prompt in prompts]
        answers = [asyncio.create_task(read(stream)) for stream in streams]
        decode = cluster.local.decode_nodes[0].host
        await until(lambda: decode.status().num_generated_tokens > 4)
        paused = await dispatcher.pause(PauseMode.KEEP)
        assert set(paused.values()) == {True}
        await asyncio.sleep(0.02)  # what ran when the pause came has ended
        hosts = [node.host for node in cluster.local.nodes]
        steps = [host.status().num_steps for host in hosts]
        assert {host.status().paused for host in hosts} == {PauseMode.KEEP}
        await asyncio.sleep(0.1)
        assert [host.status().num_steps for host in hosts] == steps
        await streams[0].aclose()  # whoever leaves meanwhile gives its blocks back
        await dispatcher.resume()
        tokens = await asyncio.gather(*answers[1:])
        with pytest.raises(RequestAborted):
            await answers[0]
    assert tokens == [expected_tokens(prompt, SAMPLING) for prompt in prompts[1:]]


@BOTH
async def test_running_requests_go_on_and_nobody_is_admitted(async_scheduling: bool) -> None:
    cluster = HashCluster(unified=True, async_scheduling=async_scheduling, step_s=0.001)
    async with cluster.running():
        host = cluster.local.nodes[0].host
        first = asyncio.create_task(cluster.generate(prompt_of(20), SAMPLING))
        await until(lambda: host.status().num_running == 1)
        await cluster.local.dispatcher.pause(PauseMode.WAIT)
        second = asyncio.create_task(cluster.generate(prompt_of(30), SAMPLING))
        assert await first == expected_tokens(prompt_of(20), SAMPLING)
        await until(lambda: host.status().num_waiting == 1)
        assert host.status().num_running == 0
        await cluster.local.dispatcher.resume()
        assert await second == expected_tokens(prompt_of(30), SAMPLING)


@BOTH
@SHAPES
async def test_a_reset_in_the_middle_changes_no_token(
    unified: bool, async_scheduling: bool
) -> None:
    cluster = HashCluster(unified=unified, async_scheduling=async_scheduling, step_s=0.001)
    prompts = [prompt_of(60, seed) for seed in range(4)]
    async with cluster.running():
        answers = [asyncio.create_task(cluster.generate(p, SAMPLING)) for p in prompts]
        decode = cluster.local.decode_nodes[0].host
        for goal in (2, 40, 80):
            await until(lambda goal=goal: decode.status().num_generated_tokens > goal)  # type: ignore[misc]
            await cluster.local.dispatcher.reset_prefix_cache(reset_running_requests=True)
        tokens = await asyncio.gather(*answers)
        assert decode.status().num_preemptions > 0
    assert tokens == [expected_tokens(prompt, SAMPLING) for prompt in prompts]


async def test_nothing_is_hit_after_a_reset() -> None:
    prompt = prompt_of(64)
    async with HashCluster(unified=True).running() as cluster:
        host = cluster.local.nodes[0].host
        await cluster.generate(prompt, SAMPLING)
        await cluster.at_rest()
        assert host.status().blocks.cached > 0
        done = await cluster.local.dispatcher.reset_prefix_cache(reset_running_requests=False)
        assert done == {"unified-0": True}
        await until(lambda: host.status().blocks.cached == 0)
        hits = host.status().num_prefix_hits
        await cluster.generate(prompt, SAMPLING)
        assert host.status().num_prefix_hits == hits


async def test_blocks_in_use_forbid_a_reset() -> None:
    cluster = HashCluster(unified=True, step_s=0.002)
    async with cluster.running():
        host = cluster.local.nodes[0].host
        answer = asyncio.create_task(cluster.generate(prompt_of(64), SAMPLING))
        await until(lambda: host.status().num_running == 1)
        done = await cluster.local.dispatcher.reset_prefix_cache(reset_running_requests=False)
        assert done == {"unified-0": False}
        assert await answer == expected_tokens(prompt_of(64), SAMPLING)


async def test_a_node_that_is_down_cannot_be_paused() -> None:
    async with HashCluster(unified=True).running() as cluster:
        node = cluster.local.nodes[0]
    with pytest.raises(NodeLost):
        await node.pause(PauseMode.KEEP)


async def test_an_idle_node_does_not_spin() -> None:
    """Neither when it is paused with work to do: it looks around once a second."""
    cluster = HashCluster(unified=True)
    async with cluster.running():
        scheduler = cluster.local.nodes[0].host.engine.scheduler
        planned = 0
        schedule = scheduler.schedule

        def counted() -> object:
            nonlocal planned
            planned += 1
            return schedule()

        scheduler.schedule = counted  # type: ignore[method-assign, assignment]
        await cluster.generate(prompt_of(20), SAMPLING)
        await cluster.at_rest()
        await cluster.local.dispatcher.pause(PauseMode.KEEP)
        answer = asyncio.create_task(cluster.generate(prompt_of(20), SAMPLING))
        await asyncio.sleep(0.05)
        before = planned
        await asyncio.sleep(0.5)
        assert planned - before <= 3
        await cluster.local.dispatcher.resume()
        await answer
