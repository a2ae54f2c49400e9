"""A local cluster of hash-model nodes, and what must be true of it at rest."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from cluster import LocalCluster, LocalConfig, Topology
from cluster.local import TransportFactory
from engine import EngineHost
from kv_transfer import HandoffConfig
from protocol import GenerationRequest, SamplingParams, TokenStream
from router import RouterConfig
from scheduler import Policy, SchedulerKnobs
from tests.hash_model import HashComputeFactory, hash_files

_REST_S = 20.0


class HashCluster:
    """Runs requests and compares them with what an undisturbed run gives."""

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        unified: bool | int = False,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 512,
        step_s: float = 0.0,
        prefix_caching: bool = True,
        policy: Policy = "fcfs",
        reserve_full_isl: bool = True,
        long_prefill_token_threshold: int = 0,
        async_scheduling: bool = True,
        record_schedules: Path | None = None,
        handoff: HandoffConfig | None = None,
        make_transport: TransportFactory | None = None,
        router: RouterConfig | None = None,
    ) -> None:
        """`unified`: all nodes are, or so many beside the others."""
        self.compute = HashComputeFactory(num_blocks, step_s=step_s)
        config = LocalConfig(
            topology=Topology.UNIFIED if unified is True else Topology.DISAGGREGATED,
            num_prefill=prefill,
            num_decode=decode,
            num_unified=0 if unified is True else unified,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            enable_prefix_caching=prefix_caching,
            scheduler=SchedulerKnobs(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=policy,
                scheduler_reserve_full_isl=reserve_full_isl,
                long_prefill_token_threshold=long_prefill_token_threshold,
                async_scheduling=async_scheduling,
            ),
            router=router or RouterConfig(default_prefill_tokens_per_s=1e5),
            record_schedules=record_schedules,
        )
        self.local = LocalCluster(
            config, hash_files(), self.compute, handoff=handoff, make_transport=make_transport
        )
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[HashCluster]:
        """Started; afterwards at rest, stopped, and with nothing left behind."""
        before = _resources()
        await self.local.start()
        try:
            yield self
            await self.at_rest()
            self.check_integrity()
        finally:
            await self.local.stop()
        gc.collect()
        assert _resources() == before, "threads, tasks or descriptors are left"

    async def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, **fields: object
    ) -> TokenStream:
        request = GenerationRequest(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_time=time.time(),
            **fields,  # type: ignore[arg-type]
        )
        return await self.local.dispatcher.submit(request)

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        return await read(await self.submit(prompt, sampling))

    async def at_rest(self) -> None:
        """Wait until no node has a job, a request or a transfer any more."""
        deadline = time.monotonic() + _REST_S
        while not all(self._is_idle(node.host) for node in self.local.nodes):
            assert time.monotonic() < deadline, self._describe()
            await asyncio.sleep(0.005)

    @staticmethod
    def _is_idle(host: EngineHost) -> bool:
        status = host.status()
        busy = (
            host.jobs
            or host.engine.scheduler.has_requests()
            or status.transfers.active
            or status.num_intake
            or status.num_waiting
            or status.blocks.used
            or status.blocks.quarantined
        )
        return not busy

    def _describe(self) -> str:
        lines = []
        for node in self.local.nodes:
            lines.append(f"{node.host.status()}")
            lines += [f"  {r!r}" for r in node.host.engine.scheduler.requests.values()]
            connector = node.host.engine.connector
            lines += [f"  {s!r}" for s in getattr(connector, "sources", {}).values()]
            lines += [f"  {s!r}" for s in getattr(connector, "sinks", {}).values()]
        return "\n".join(lines)

    def check_integrity(self) -> None:
        """All blocks are accounted for, and none is used."""
        for node in self.local.nodes:
            scheduler = node.host.engine.scheduler
            scheduler.check_integrity()
            counts = scheduler.block_counts()
            assert counts.balanced, counts
            assert counts.used == 0, counts
            assert counts.quarantined == 0, counts


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a node's thread does; nothing tells when it has."""
    deadline = time.monotonic() + _REST_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.001)


async def read(stream: TokenStream) -> list[int]:
    """All tokens of a request."""
    tokens: list[int] = []
    async for chunk in stream:
        tokens.extend(chunk.token_ids)
    return tokens


def _resources() -> tuple[set[str], int, int]:
    threads = {t.name for t in threading.enumerate() if t.name.startswith(("engine-", "copy-"))}
    tasks = len([t for t in asyncio.all_tasks() if not t.done()])
    return threads, tasks, len(os.listdir("/proc/self/fd"))
