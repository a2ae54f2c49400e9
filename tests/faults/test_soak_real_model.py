"""Many hand-offs of the real model, some of which go wrong: its tokens are the reference."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import LocalConfig, ProcessCluster, TransferConfig, TransportChoice
from engine.weights import ModelStore
from kv_transfer import FaultPlan
from protocol import SamplingParams
from router import RouterConfig
from scheduler import SchedulerKnobs
from tests.faults.fault_cluster import ProcessesCluster
from tests.faults.journal import entries
from tests.faults.test_soak import MAX_GROWTH_BYTES, MIN_HIT, WARM_UP, soak_faults
from tests.reference.cases import MODEL, ReferenceCase, reference_cases

CONCURRENCY = 32
NUM_SHORT, NUM_LONG = 60, 10_000
MAX_PROMPT_TOKENS = 17
CASES = [c for c in reference_cases() if len(c.prompt_token_ids) <= MAX_PROMPT_TOKENS]

pytestmark = [pytest.mark.slow, pytest.mark.real_model]


def _config(journal: Path) -> LocalConfig:
    """Nothing is cached: every prompt has to travel."""
    return LocalConfig(
        processes=True,
        enable_prefix_caching=False,
        max_model_len=64,
        num_blocks=512,
        scheduler=SchedulerKnobs(max_num_seqs=CONCURRENCY, max_num_batched_tokens=128),
        transfer=TransferConfig(
            transport=TransportChoice.SHM,
            heartbeat_s=0.5,
            transfer_timeout_s=4.0,
            reserve_timeout_s=10.0,
            faults=FaultPlan(seed=11, faults=tuple(soak_faults()), journal=str(journal)),
        ),
        router=RouterConfig(max_attempts=10),
    )


class RealSoak:
    """Rounds on one cluster: the beginning of a case's output, and whether it is right."""

    def __init__(self, cluster: ProcessesCluster, num_rounds: int) -> None:
        self._cluster = cluster
        self._num_rounds = num_rounds
        self._random = random.Random(5)
        self.num_compared = 0
        self.warm: dict[str, int] = {}

    async def run(self) -> None:
        rounds = iter(range(self._num_rounds))
        async with asyncio.TaskGroup() as seats:
            for _ in range(CONCURRENCY):
                seats.create_task(self._sit(rounds))

    async def _sit(self, rounds: Iterator[int]) -> None:
        for number in rounds:
            if number == int(WARM_UP * self._num_rounds):
                self.warm = self._cluster.resident_bytes()
            await self._round(number, self._random.choice(CASES), self._random.randint(2, 8))

    async def _round(self, number: int, case: ReferenceCase, max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        stream = await self._cluster.submit(f"r{number}", case.prompt_token_ids, sampling)
        tokens = [token async for chunk in stream for token in chunk.token_ids]
        assert len(tokens) == max_tokens
        case.check(tokens)
        self.num_compared += min(case.comparable_length(), len(tokens))


@pytest.mark.timeout(5400)
async def test_tokens_are_right_whatever_goes_wrong(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    num_rounds = NUM_LONG if request.config.getoption("--all-faults") else NUM_SHORT
    journal = tmp_path / "journal"
    files = ModelStore(Path.home() / ".cache" / "kvrelay").resolve(MODEL)
    processes = ProcessCluster(_config(journal), files)
    await processes.start()
    try:
        cluster = ProcessesCluster(processes)
        soak = RealSoak(cluster, num_rounds)
        await soak.run()
        await cluster.at_rest()
        gc.collect()
        growth = {w: size - soak.warm[w] for w, size in cluster.resident_bytes().items()}
    finally:
        await processes.stop()
    hit = {entry.ticket.partition("/")[0] for entry in entries(journal)}
    assert len(hit) >= MIN_HIT * num_rounds
    assert soak.num_compared >= 2 * num_rounds
    if num_rounds == NUM_LONG:
        assert max(growth.values()) < MAX_GROWTH_BYTES, growth
