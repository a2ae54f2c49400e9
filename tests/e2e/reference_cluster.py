"""A cluster of the real model that answers the recorded prompts, in one process or in several."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from cluster import LocalCluster, LocalConfig, NodeCompute, ProcessCluster
from cluster.torch_compute import torch_compute
from engine.kv_cache import KVCache
from engine.weights import ModelFiles, ModelStore
from protocol import GenerationRequest, Role, SamplingParams
from router import Dispatcher
from tests.process_cluster import started
from tests.reference.cases import MODEL, NUM_OUTPUT_TOKENS, ReferenceCase

Cluster = LocalCluster | ProcessCluster


class Routed(Protocol):
    """Whatever answers requests."""

    @property
    def dispatcher(self) -> Dispatcher: ...


def reference_model() -> ModelFiles:
    return ModelStore(Path.home() / ".cache" / "kvrelay").resolve(MODEL)


@contextlib.asynccontextmanager
async def serving_reference(files: ModelFiles, config: LocalConfig) -> AsyncIterator[Cluster]:
    """Where the nodes have processes of their own, none of them is left afterwards."""
    if config.processes:
        apart = ProcessCluster(config, files)
        async with started(apart):
            yield apart
    else:
        async with serving_pools(files, config) as (together, _):
            yield together


@contextlib.asynccontextmanager
async def serving_pools(
    files: ModelFiles, config: LocalConfig
) -> AsyncIterator[tuple[LocalCluster, list[KVCache]]]:
    """In one process, with the KV pools of the nodes in their order."""
    pools: list[KVCache] = []
    make = torch_compute(files, config)

    def make_compute(role: Role) -> NodeCompute:
        compute = make(role)
        assert isinstance(compute.owner, tuple)
        pools.append(compute.owner[0])
        return compute

    cluster = LocalCluster(config, files, make_compute)
    await cluster.start()
    try:
        yield cluster, pools
    finally:
        await cluster.stop()


async def answer(
    cluster: Routed, case: ReferenceCase, num_tokens: int = NUM_OUTPUT_TOKENS
) -> list[int]:
    request = GenerationRequest(
        request_id=case.name,
        prompt_token_ids=case.prompt_token_ids,
        sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens),
        arrival_time=time.time(),
    )
    stream = await cluster.dispatcher.submit(request)
    return [token async for chunk in stream for token in chunk.token_ids]


async def check_all(
    cluster: Routed,
    cases: Sequence[ReferenceCase],
    concurrency: int,
    num_tokens_of: Callable[[ReferenceCase], int],
) -> None:
    """Ask for so many tokens of each case, so many cases at once. They are the recorded ones."""
    seats = asyncio.Semaphore(concurrency)

    async def check(case: ReferenceCase) -> None:
        num_tokens = num_tokens_of(case)
        async with seats:
            tokens = await answer(cluster, case, num_tokens)
        assert len(tokens) == num_tokens
        case.check(tokens)

    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(check(case))
