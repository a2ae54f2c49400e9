"""Nodes that drain and change their roles while requests run: none fails, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import LocalCluster, LocalConfig
from cluster.engine_node import EngineNode
from kv_transfer import HandoffConfig, OnTransferFailure
from protocol import (
    ConfigError,
    DecodeJob,
    GenerationRequest,
    PrefillJob,
    Role,
    SamplingParams,
    WrongRole,
)
from router import RouterConfig
from scheduler import SchedulerKnobs
from scheduler.replay import load
from tests.hash_cluster import HashCluster, read, until
from tests.hash_model import HashComputeFactory, expected_tokens, hash_files, prompt_of
from tests.scheduler.recordings import check_replays

TIMEOUT_S = 60.0
ROUTER = RouterConfig(default_prefill_tokens_per_s=1e5)


class Load:
    """Requests that come one after the other, some at a time, until it is told to stop."""

    def __init__(self, cluster: HashCluster, *, concurrency: int = 12) -> None:
        self._cluster = cluster
        self._concurrency = concurrency
        self._going = True
        self.num_done = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Raises, at the end, what went wrong with any of the requests."""
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for seed in range(self._concurrency):
                tasks.create_task(self._ask(random.Random(seed)))
            yield self
            self._going = False

    async def _ask(self, chance: random.Random) -> None:
        while self._going:
            prompt = prompt_of(chance.randint(1, 200), chance.randrange(100))
            sampling = SamplingParams(max_tokens=chance.randint(1, 40))
            assert await self._cluster.generate(prompt, sampling) == expected_tokens(
                prompt, sampling
            )
            self.num_done += 1

    async def goes_on(self, count: int = 6) -> None:
        """So many requests have ended since."""
        before = self.num_done
        await until(lambda: self.num_done >= before + count)


def node_of(cluster: HashCluster, node_id: str) -> EngineNode:
    (node,) = (node for node in cluster.local.nodes if node.info.node_id == node_id)
    return node


def check_empty(node: EngineNode) -> None:
    """Drained means that nothing is there, and all blocks are accounted for."""
    counts = node.host.engine.scheduler.block_counts()
    assert not node.host.jobs
    assert (counts.used, counts.quarantined, counts.balanced) == (0, 0, True)
    assert node.host.status().draining


@pytest.mark.parametrize(
    ("timeout_s", "on_transfer_failure"),
    [(0.0, "retry"), (0.0, "recompute"), (0.0, "fail"), (0.05, "retry"), (None, "retry")],
)
async def test_each_node_drains_under_load(
    timeout_s: float | None, on_transfer_failure: OnTransferFailure
) -> None:
    handoff = HandoffConfig(on_transfer_failure=on_transfer_failure)
    cluster = HashCluster(prefill=2, decode=2, step_s=0.001, handoff=handoff, router=ROUTER)
    async with cluster.running(), Load(cluster).running() as load:
        for node in cluster.local.nodes:
            await load.goes_on()
            await node.drain(timeout_s)
            check_empty(node)
            await load.goes_on()  # on the others
            check_empty(node)
            await node.undrain()
            assert not (await node.status()).draining


@pytest.mark.parametrize("shape", [{}, {"async_scheduling": False}], ids=str)
async def test_each_node_takes_each_role_under_load(shape: dict[str, Any]) -> None:
    cluster = HashCluster(prefill=2, decode=2, unified=1, step_s=0.001, router=ROUTER, **shape)
    async with cluster.running(), Load(cluster).running() as load:
        for node in cluster.local.nodes:
            home = node.info.role
            for role in (*(role for role in Role if role is not home), home):
                before = node.info
                info = await cluster.local.change_role(before.node_id, role)
                assert info == node.info
                assert (info.role, info.generation) == (role, before.generation + 1)
                assert (await node.status()).role is role
                await load.goes_on(4)
        assert [node.info.role for node in cluster.local.nodes] == [
            *[Role.PREFILL] * 2,
            *[Role.DECODE] * 2,
            Role.UNIFIED,
        ]


async def test_the_cache_is_kept() -> None:
    """A prompt that was computed on P is hit on it when it decodes, and the router knows that."""
    sampling, prompt = SamplingParams(max_tokens=4), prompt_of(160)
    longer = [*prompt, *prompt_of(20, seed=1)]
    async with HashCluster(prefill=2, decode=1).running() as cluster:
        await cluster.generate(prompt, sampling)
        await cluster.at_rest()
        used = [n for n in cluster.local.prefill_nodes if n.host.status().num_generated_tokens]
        (node,) = used
        (decode,) = cluster.local.decode_nodes
        await cluster.local.change_role(node.info.node_id, Role.UNIFIED)
        await decode.drain()
        before = node.host.status()
        assert await cluster.generate(longer, sampling) == expected_tokens(longer, sampling)
        await cluster.at_rest()
        after = node.host.status()
        assert after.num_prefix_hits - before.num_prefix_hits == 160
        computed = after.num_prompt_tokens_computed - before.num_prompt_tokens_computed
        assert computed == len(longer) - 160
        await decode.undrain()
        # And back: what it computed in between is hit, too.
        await cluster.local.change_role(node.info.node_id, Role.PREFILL)
        await until(lambda: not cluster.local.dispatcher._cluster.index.needs_snapshot())
        hits = cluster.local.dispatcher._cluster.index
        again = [*longer, *prompt_of(30, seed=2)]
        assert await cluster.generate(again, sampling) == expected_tokens(again, sampling)
        await cluster.at_rest()
        assert hits.needs_snapshot() == frozenset()
        computed = node.host.status().num_prompt_tokens_computed - after.num_prompt_tokens_computed
        assert computed == len(again) - 176


async def test_a_node_hands_off_to_one_that_it_was_handed_to_by() -> None:
    """Both turn round, and the same two transports carry KV the other way."""
    sampling = SamplingParams(max_tokens=6)
    async with HashCluster().running() as cluster:
        first, second = (node.info.node_id for node in cluster.local.nodes)
        await cluster.generate(prompt_of(100, 1), sampling)
        for prefill, decode in ((second, first), (first, second)):
            await asyncio.gather(
                cluster.local.change_role(prefill, Role.PREFILL),
                cluster.local.change_role(decode, Role.DECODE),
            )
            pushed = node_of(cluster, prefill).host.status().transfers.blocks
            prompt = prompt_of(100, pushed + 7)
            assert await cluster.generate(prompt, sampling) == expected_tokens(prompt, sampling)
            await cluster.at_rest()
            assert node_of(cluster, prefill).host.status().transfers.blocks == pushed + 7


async def test_jobs_for_another_role_are_refused() -> None:
    async with HashCluster().running() as cluster:
        prefill, decode = cluster.local.nodes
        request = GenerationRequest(
            request_id="r", prompt_token_ids=(5,), sampling=SamplingParams(), arrival_time=0.0
        )
        with pytest.raises(WrongRole, match="prefill-0 is a prefill node: no decode jobs"):
            await prefill.decode(DecodeJob(request=request, caller="me"))
        with pytest.raises(WrongRole, match="decode-0 is a decode node: no prefill jobs"):
            await decode.prefill(PrefillJob(request=request, caller="me"))


async def test_the_role_that_it_has_is_no_change() -> None:
    async with HashCluster().running() as cluster:
        prefill, _ = cluster.local.nodes
        await prefill.drain()
        before = prefill.info
        assert await cluster.local.change_role("prefill-0", Role.PREFILL) is before
        assert (await prefill.status()).draining  # nothing at all
        await prefill.undrain()


# ---------------------------------------------------------------------- settings of a role


async def ask(cluster: LocalCluster, name: str) -> None:
    prompt, sampling = prompt_of(70), SamplingParams(max_tokens=9)
    request = GenerationRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, arrival_time=0.0
    )
    tokens = await read(await cluster.dispatcher.submit(request))
    assert tokens == expected_tokens(prompt, sampling)


def cluster_of(**settings: Any) -> LocalCluster:
    config = LocalConfig(max_model_len=512, num_blocks=64, **settings)
    return LocalCluster(config, hash_files(), HashComputeFactory(64))


async def test_knobs_are_those_of_the_role() -> None:
    cluster = cluster_of(
        prefill_scheduler=SchedulerKnobs(
            max_num_seqs=4, max_num_batched_tokens=128, policy="priority"
        ),
        decode_scheduler=SchedulerKnobs(max_num_seqs=16, max_num_batched_tokens=64),
    )
    await cluster.start()
    try:
        node, _ = cluster.nodes
        assert (node.info.max_num_seqs, node.info.max_num_batched_tokens) == (4, 128)
        info = await cluster.change_role("prefill-0", Role.UNIFIED)
        assert (info.max_num_seqs, info.max_num_batched_tokens) == (16, 64)
        config = node.host.engine.scheduler.config
        assert (config.max_num_seqs, config.policy) == (16, "fcfs")
        await cluster.change_role("prefill-0", Role.PREFILL)
        assert node.host.engine.scheduler.config.policy == "priority"
    finally:
        await cluster.stop()


async def test_what_cannot_change_is_said_at_once() -> None:
    cluster = cluster_of(prefill_scheduler=SchedulerKnobs(async_scheduling=False))
    await cluster.start()
    try:
        with pytest.raises(ConfigError, match=r"async_scheduling: .* prefill and decode nodes"):
            await cluster.change_role("prefill-0", Role.DECODE)
        assert not (await cluster.nodes[0].status()).draining
        assert (await cluster.change_role("decode-0", Role.UNIFIED)).role is Role.UNIFIED
    finally:
        await cluster.stop()


@pytest.mark.parametrize("differs", [False, True])
async def test_recorded_schedules(tmp_path: Path, differs: bool) -> None:
    """A recording goes on if nothing changes for the scheduler; else the role does not change."""
    own = SchedulerKnobs(max_num_seqs=7) if differs else None
    cluster = cluster_of(record_schedules=tmp_path, prefill_scheduler=own)
    await cluster.start()
    try:
        if differs:
            with pytest.raises(ConfigError, match=r"record_schedules: .*prefill-0"):
                await cluster.change_role("prefill-0", Role.UNIFIED)
        for role in () if differs else (Role.UNIFIED, Role.PREFILL):
            await asyncio.gather(*(ask(cluster, f"{role}/{seed}") for seed in range(6)))
            assert (await cluster.change_role("prefill-0", role)).role is role
        await ask(cluster, "last")
    finally:
        await cluster.stop()
    for name in ("prefill-0", "decode-0"):
        trace = load(tmp_path / f"{name}.json")
        assert sum(len(step.add) for step in trace.steps) >= (1 if differs else 7)
        check_replays(trace)
