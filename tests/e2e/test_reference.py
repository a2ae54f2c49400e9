"""The tokens are those of an independent implementation, whichever way they are computed.

`make verify` runs every combination; otherwise each two values of different factors meet, and
requests that are alone, which take longest, are asked for as many tokens as it takes to get well
into the next block, and without the two longest prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from cluster import LocalCluster, LocalConfig
from engine.kv_cache import KVCache
from engine.weights import ModelFiles
from protocol import NodeStatus, Role
from tests.e2e.combinations import MAX_MODEL_LEN, Combination, pairwise_cover, verified_combinations
from tests.e2e.reference_cluster import (
    answer,
    check_all,
    reference_model,
    serving_pools,
    serving_reference,
)
from tests.process_cluster import at_rest
from tests.reference.cases import (
    NUM_OUTPUT_TOKENS,
    ReferenceCase,
    comparable_share,
    reference_cases,
)
from tests.reference.prompts import BLOCK_SIZE

CASES = reference_cases()
SHORTER_CASES = [case for case in CASES if len(case.prompt_token_ids) <= 600]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-combinations")
        chosen = verified_combinations() if everything else pairwise_cover()
        metafunc.parametrize("combination", chosen, ids=str)


def whole(case: ReferenceCase) -> int:
    return NUM_OUTPUT_TOKENS


def num_into_the_next_block(case: ReferenceCase) -> int:
    """The KV of two of them is put into the block after those that the prompt needs."""
    return -len(case.prompt_token_ids) % BLOCK_SIZE + 3


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return reference_model()


def test_the_cases_are_many_and_comparable() -> None:
    assert len(CASES) >= 24
    assert comparable_share(CASES) >= 0.9
    lengths = {len(case.prompt_token_ids) for case in CASES}
    assert {1, 15, 16, 17, 1500} <= lengths
    assert all(len(case.output_token_ids) == NUM_OUTPUT_TOKENS for case in CASES)


@pytest.mark.real_model
@pytest.mark.timeout(900)
async def test_tokens_are_those_of_the_reference(
    files: ModelFiles, combination: Combination, pytestconfig: pytest.Config
) -> None:
    everything = pytestconfig.getoption("--all-combinations")
    short = combination.concurrency == 1 and not everything
    cases = SHORTER_CASES if short else CASES
    num_tokens = num_into_the_next_block if short else whole
    async with serving_reference(files, combination.config()) as cluster:
        await check_all(cluster, cases, combination.concurrency, num_tokens)
        statuses = await at_rest(cluster)
        if isinstance(cluster, LocalCluster):
            for node in cluster.nodes:
                node.host.engine.scheduler.check_integrity()
    check_counters(statuses, combination)
    check_handoffs(statuses, cases)


def check_counters(statuses: list[NodeStatus], combination: Combination) -> None:
    """What must have happened on the way, and what must not."""
    preemptions = sum(status.num_preemptions for status in statuses)
    if combination.must_preempt:
        assert preemptions > 0
    assert combination.tiny_pool or not preemptions
    for status in statuses:
        assert status.transfers.reasons == {}
        assert status.transfers.live == ()
        assert status.admitting


def check_handoffs(statuses: list[NodeStatus], cases: Sequence[ReferenceCase]) -> None:
    """Every prompt came to a decode node through one hand-off, and was not computed there."""
    decode = [status for status in statuses if status.role is Role.DECODE]
    if not decode:
        return
    computed = sum(status.num_prompt_tokens_computed for status in decode)
    assert computed == sum(status.num_prompt_tokens_recomputed for status in decode)
    loaded = sum(s.num_prompt_tokens_loaded + s.num_prefix_hits for s in decode)
    assert loaded >= sum(len(case.prompt_token_ids) for case in cases)
    for role in (Role.PREFILL, Role.DECODE):
        assert sum(s.transfers.committed for s in statuses if s.role is role) == len(cases)


@pytest.mark.real_model
async def test_nothing_in_a_pool_counts_but_what_was_pushed(files: ModelFiles) -> None:
    """D's pool is NaN before the push, P's is NaN after the commit."""
    # Without a cache, because what it would hit of an earlier case is spoilt.
    config = LocalConfig(num_blocks=200, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False)
    chosen = [case for case in CASES if len(case.prompt_token_ids) in (1, 16, 17, 33)][:4]
    long = next(case for case in CASES if len(case.prompt_token_ids) > 600)
    async with serving_pools(files, config) as (cluster, (prefill, decode)):
        for case in [*chosen, long]:
            decode.tensor.fill_(float("nan"))
            spoil = asyncio.create_task(spoil_after_commit(cluster, prefill))
            case.check(await answer(cluster, case))
            assert await spoil < NUM_OUTPUT_TOKENS, "it was spoilt too late to matter"


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
