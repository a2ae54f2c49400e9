"""A cluster of hash-model nodes in processes of their own, of which nothing may be left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import select
import time
from collections.abc import AsyncIterator, Sequence

from cluster import (
    LocalCluster,
    LocalConfig,
    ProcessCluster,
    Topology,
    TransferConfig,
    TransportChoice,
)
from protocol import GenerationRequest, NodeStatus, SamplingParams, TokenStream
from router import RouterConfig
from scheduler import SchedulerKnobs
from tests.hash_model import hash_files

_REST_S = 20.0
_numbers = itertools.count()


def process_config(
    *,
    prefill: int = 1,
    decode: int = 1,
    unified: bool = False,
    transport: TransportChoice = TransportChoice.AUTO,
) -> LocalConfig:
    return LocalConfig(
        topology=Topology.UNIFIED if unified else Topology.DISAGGREGATED,
        processes=True,
        num_prefill=prefill,
        num_decode=decode,
        max_model_len=512,
        num_blocks=64,
        scheduler=SchedulerKnobs(max_num_seqs=8, max_num_batched_tokens=64),
        transfer=TransferConfig(transport=transport),
        router=RouterConfig(default_prefill_tokens_per_s=1e5),
    )


@contextlib.asynccontextmanager
async def running(
    config: LocalConfig, compute: str = "hash_compute", token: str | None = None
) -> AsyncIterator[ProcessCluster]:
    """Started; afterwards stopped, and no process, task or descriptor is left."""
    cluster = ProcessCluster(config, hash_files(), f"tests.hash_compute:{compute}", token=token)
    async with started(cluster):
        yield cluster


@contextlib.asynccontextmanager
async def started(cluster: ProcessCluster) -> AsyncIterator[None]:
    """Afterwards it is stopped, and no process, task or descriptor is left."""
    gc.collect()  # what earlier tests have left to it
    before = _resources()
    await cluster.start()
    pidfds = [os.pidfd_open(node.pid) for node in cluster.nodes]
    try:
        yield
    finally:
        await cluster.stop()
        for pidfd in pidfds:
            assert has_exited(pidfd)
            os.close(pidfd)
    gc.collect()
    assert _resources() == before, "tasks or descriptors are left"


def has_exited(pidfd: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


async def submit(
    cluster: ProcessCluster, prompt: Sequence[int], sampling: SamplingParams
) -> TokenStream:
    return await cluster.dispatcher.submit(
        GenerationRequest(
            request_id=f"r{next(_numbers)}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_time=time.time(),
        )
    )


async def generate(
    cluster: ProcessCluster, prompt: Sequence[int], sampling: SamplingParams
) -> list[int]:
    stream = await submit(cluster, prompt, sampling)
    return [token async for chunk in stream for token in chunk.token_ids]


async def at_rest(cluster: LocalCluster | ProcessCluster) -> list[NodeStatus]:
    """Wait until no node has anything of any request; their statuses then."""
    deadline = time.monotonic() + _REST_S
    while True:
        statuses = [await node.status() for node in cluster.nodes]
        assert all(status.blocks.balanced for status in statuses)
        if not any(map(is_busy, statuses)):
            return statuses
        assert time.monotonic() < deadline, statuses
        await asyncio.sleep(0.01)


def is_busy(status: NodeStatus) -> bool:
    return bool(
        status.num_running
        or status.num_waiting
        or status.num_skipped_waiting
        or status.num_intake
        or status.transfers.active
        or status.blocks.used
        or status.blocks.quarantined
    )


def _resources() -> tuple[int, int]:
    tasks = len([task for task in asyncio.all_tasks() if not task.done()])
    return tasks, len(os.listdir("/proc/self/fd"))
