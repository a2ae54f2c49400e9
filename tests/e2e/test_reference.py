"""The tokens are those of an independent implementation, whichever way they are computed.

`make verify` runs every combination; otherwise each two values of different factors meet.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from cluster import LocalCluster, LocalConfig, NodeCompute
from cluster.torch_compute import torch_compute
from engine.kv_cache import KVCache
from engine.weights import ModelFiles, ModelStore
from protocol import GenerationRequest, SamplingParams
from tests.e2e.combinations import MAX_MODEL_LEN, Combination, all_combinations, pairwise_cover
from tests.reference.cases import (
    MODEL,
    NUM_OUTPUT_TOKENS,
    ReferenceCase,
    comparable_share,
    reference_cases,
)

CASES = reference_cases()
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-combinations")
        chosen = all_combinations() if everything else pairwise_cover()
        metafunc.parametrize("combination", chosen, ids=str)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ModelStore(Path.home() / ".cache" / "kvrelay").resolve(MODEL)


class ReferenceCluster:
    """A cluster of the real model; keeps the KV pools of its nodes, in their order."""

    def __init__(self, files: ModelFiles, config: LocalConfig) -> None:
        self.pools: list[KVCache] = []
        self._make = torch_compute(files, config)
        self.local = LocalCluster(config, files, self._make_compute)

    def _make_compute(self) -> NodeCompute:
        compute = self._make()
        assert isinstance(compute.owner, KVCache)
        self.pools.append(compute.owner)
        return compute

    async def generate(self, name: str, case: ReferenceCase) -> list[int]:
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=case.prompt_token_ids,
            sampling=GREEDY,
            arrival_time=time.time(),
        )
        stream = await self.local.dispatcher.submit(request)
        return [token async for chunk in stream for token in chunk.token_ids]

    async def check_all(self, concurrency: int) -> None:
        seats = asyncio.Semaphore(concurrency)

        async def check(case: ReferenceCase) -> None:
            async with seats:
                tokens = await self.generate(case.name, case)
            assert len(tokens) == NUM_OUTPUT_TOKENS
            case.check(tokens)

        async with asyncio.TaskGroup() as group:
            for case in CASES:
                group.create_task(check(case))


def test_the_cases_are_many_and_comparable() -> None:
    assert len(CASES) >= 24
    assert comparable_share(CASES) >= 0.9
    lengths = {len(case.prompt_token_ids) for case in CASES}
    assert {1, 15, 16, 17, 1500} <= lengths
    assert all(len(case.output_token_ids) == NUM_OUTPUT_TOKENS for case in CASES)


@pytest.mark.real_model
@pytest.mark.timeout(900)
async def test_tokens_are_those_of_the_reference(
    files: ModelFiles, combination: Combination
) -> None:
    cluster = ReferenceCluster(files, combination.config())
    await cluster.local.start()
    try:
        await cluster.check_all(combination.concurrency)
        await asyncio.gather(*(node.drain() for node in cluster.local.nodes))
        check_counters(cluster.local, combination)
    finally:
        await cluster.local.stop()


def check_counters(local: LocalCluster, combination: Combination) -> None:
    """What must have happened on the way, and what must not."""
    prompt_tokens = sum(len(case.prompt_token_ids) for case in CASES)
    decode = [node.host.status() for node in local.decode_nodes]
    preemptions = sum(node.host.status().num_preemptions for node in local.nodes)
    if combination.must_preempt:
        assert preemptions > 0
    assert combination.tiny_pool or not preemptions
    if local.prefill_nodes:
        computed = sum(status.num_prompt_tokens_computed for status in decode)
        assert computed == sum(status.num_prompt_tokens_recomputed for status in decode)
        loaded = sum(s.num_prompt_tokens_loaded + s.num_prefix_hits for s in decode)
        assert loaded >= prompt_tokens
        assert sum(status.transfers.committed for status in decode) == len(CASES)
    for node in local.nodes:
        node.host.engine.scheduler.check_integrity()
        blocks = node.host.status().blocks
        assert blocks.balanced
        assert blocks.used == blocks.quarantined == 0


@pytest.mark.real_model
async def test_nothing_in_a_pool_counts_but_what_was_pushed(files: ModelFiles) -> None:
    """D's pool is NaN before the push, P's is NaN after the commit."""
    # Without a cache, because what it would hit of an earlier case is spoilt.
    config = LocalConfig(num_blocks=200, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False)
    cluster = ReferenceCluster(files, config)
    prefill, decode = cluster.pools
    chosen = [case for case in CASES if len(case.prompt_token_ids) in (1, 16, 17, 33)][:4]
    long = next(case for case in CASES if len(case.prompt_token_ids) > 600)
    await cluster.local.start()
    try:
        for case in [*chosen, long]:
            decode.tensor.fill_(float("nan"))
            spoil = asyncio.create_task(spoil_after_commit(cluster.local, prefill))
            case.check(await cluster.generate(case.name, case))
            assert await spoil < NUM_OUTPUT_TOKENS, "it was spoilt too late to matter"
    finally:
        await cluster.local.stop()


async def spoil_after_commit(local: LocalCluster, pool: KVCache) -> int:
    """Fill P's pool with NaN once D has it all; returns how many tokens D had made by then."""
    host = local.decode_nodes[0].host
    committed, generated = host.status().transfers.committed, host.status().num_generated_tokens
    deadline = time.monotonic() + 60
    while host.status().transfers.committed == committed:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
    pool.tensor.fill_(float("nan"))
    return host.status().num_generated_tokens - generated
