"""Nodes that die while streams run: the client sees nothing but delay."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from engine import EngineHost
from protocol import SamplingParams
from router import RouterConfig
from scheduler import ModelRunnerOutput, SchedulerOutput
from tests.hash_cluster import HashCluster, read
from tests.hash_model import HashRunner, expected_tokens, prompt_of

TIMEOUT_S = 30.0


class BrokenModel(RuntimeError):
    pass


def kill(runner: HashRunner) -> None:
    """From its next step with tokens on, the node is dead."""
    execute = runner.execute

    def breaks(step: SchedulerOutput) -> ModelRunnerOutput:
        if step.num_scheduled_tokens:
            raise BrokenModel
        return execute(step)

    runner.execute = breaks  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def running(cluster: HashCluster) -> AsyncIterator[None]:
    """Afterwards the nodes that live are at rest, and no thread is left."""
    before = set(threading.enumerate())
    await cluster.local.start()
    try:
        yield
        alive = [node.host for node in cluster.local.nodes if node.host.status().healthy]
        async with asyncio.timeout(TIMEOUT_S):
            while not all(map(_is_idle, alive)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        for host in alive:
            host.engine.scheduler.check_integrity()
        dispatcher = cluster.local.dispatcher
        assert dispatcher._flights == {}
        assert dispatcher._admission.num_inflight == dispatcher._admission.queued_tokens == 0
        assert dispatcher._cluster.load.num_attempts == 0
    finally:
        await cluster.local.stop()
    assert set(threading.enumerate()) == before


def _is_idle(host: EngineHost) -> bool:
    status = host.status()
    transfers = status.transfers.active or status.num_intake
    return not (host.jobs or transfers or status.blocks.used or status.blocks.quarantined)


@pytest.fixture
def crashes(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """What killed threads."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    return seen


@pytest.mark.parametrize(
    "dying", [["decode-0"], ["prefill-0"], ["decode-1", "prefill-1"]], ids="+".join
)
async def test_nodes_die_while_streams_run(
    dying: list[str], crashes: list[type[BaseException]]
) -> None:
    sampling = SamplingParams(max_tokens=60)
    cluster = HashCluster(
        prefill=2,
        decode=2,
        num_blocks=200,
        max_num_seqs=32,
        step_s=0.002,
        router=RouterConfig(policy="round_robin", retry_backoff_s=0.001),
    )
    names = [node.info.node_id for node in cluster.local.nodes]
    runners = dict(zip(names, cluster.compute.runners, strict=True))
    prompts = [prompt_of(length, seed) for seed in range(4) for length in (1, 20, 100, 200, 350)]
    async with running(cluster):
        streams = [await cluster.submit(prompt, sampling) for prompt in prompts]
        answers = [asyncio.create_task(read(stream)) for stream in streams]
        hosts = {node.info.node_id: node.host for node in cluster.local.nodes}
        async with asyncio.timeout(TIMEOUT_S):
            while hosts[dying[0]].status().num_generated_tokens < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for name in dying:
            kill(runners[name])
        tokens = await asyncio.wait_for(asyncio.gather(*answers), TIMEOUT_S)
        assert tokens == [expected_tokens(prompt, sampling) for prompt in prompts]
        status = await cluster.local.dispatcher.status()
        assert {r.info.node_id for r in status.nodes if r.status and not r.status.healthy} == set(
            dying
        )
        assert sum(status.retries.values()) > 0
        # The dead are known, so whoever comes later notices nothing at all.
        later = await asyncio.gather(*(cluster.generate(p, sampling) for p in prompts[:8]))
        assert later == [expected_tokens(prompt, sampling) for prompt in prompts[:8]]
        assert (await cluster.local.dispatcher.status()).retries == status.retries
    assert crashes == [BrokenModel] * len(dying)


async def test_a_node_dies_in_the_middle_of_a_push(crashes: list[type[BaseException]]) -> None:
    """D is dead before P has pushed; P must not wait for it, and its blocks come back."""
    sampling = SamplingParams(max_tokens=20)
    prompt = prompt_of(300)
    cluster = HashCluster(prefill=1, decode=2, max_num_batched_tokens=16, step_s=0.002)
    async with running(cluster):
        stream = await cluster.submit(prompt, sampling)
        hosts = [node.host for node in cluster.local.decode_nodes]
        async with asyncio.timeout(TIMEOUT_S):
            while not any(host.status().blocks.used for host in hosts):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        (receiving,) = [host for host in hosts if host.status().blocks.used]
        receiving.post(_break)
        assert await asyncio.wait_for(read(stream), TIMEOUT_S) == expected_tokens(prompt, sampling)
    assert crashes == [BrokenModel]


def _break() -> None:
    raise BrokenModel


async def test_d_keeps_its_reservation_when_p_dies(crashes: list[type[BaseException]]) -> None:
    """The dispatcher sends the next attempt to the same D, which goes on with what it has."""
    sampling = SamplingParams(max_tokens=20)
    prompt = prompt_of(300)
    cluster = HashCluster(
        prefill=2,
        decode=2,
        max_num_batched_tokens=16,
        step_s=0.005,
        router=RouterConfig(default_prefill_tokens_per_s=1e5, retry_backoff_s=0.001),
    )
    names = [node.info.node_id for node in cluster.local.nodes]
    runners = dict(zip(names, cluster.compute.runners, strict=True))
    async with running(cluster):
        stream = await cluster.submit(prompt, sampling)
        prefill = [node.host for node in cluster.local.prefill_nodes]
        decode = [node.host for node in cluster.local.decode_nodes]
        async with asyncio.timeout(TIMEOUT_S):
            while not any(host.status().blocks.used for host in decode):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        (computing,) = [host for host in prefill if host.jobs]
        (receiving,) = [host for host in decode if host.jobs]
        (key,) = receiving.jobs
        before = list(receiving.engine.scheduler.requests[key].block_ids)
        kill(runners[computing.info.node_id])
        async with asyncio.timeout(TIMEOUT_S):
            while not receiving.status().transfers.retargeted:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert receiving.status().transfers.retargeted == {"kept": 1}
        assert list(receiving.jobs) == [key]  # the same request of the scheduler
        assert receiving.engine.scheduler.requests[key].block_ids[: len(before)] == before
        assert await asyncio.wait_for(read(stream), TIMEOUT_S) == expected_tokens(prompt, sampling)
        reserved, routed = stream.timeline.reserved, stream.timeline.routed
        assert reserved is not None
        assert routed is not None
        assert reserved < routed  # for the attempt before
        assert receiving.status().num_prompt_tokens_computed == 0
    assert crashes == [BrokenModel]
