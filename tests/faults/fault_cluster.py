"""A cluster of hash-model nodes on any transport, whose nodes can be killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster import (
    LocalCluster,
    LocalConfig,
    ProcessCluster,
    Topology,
    TransferConfig,
    TransportChoice,
)
from cluster.engine_node import EngineNode
from cluster.node_builder import stop_node
from cluster.remote_node import RemoteNode
from kv_transfer import FaultPlan, OnTransferFailure
from protocol import (
    GenerationRequest,
    LiveTransfer,
    NodeStatus,
    SamplingParams,
    TokenStream,
)
from router import Dispatcher, RouterConfig
from scheduler import SchedulerKnobs
from tests import process_cluster
from tests.hash_model import HashComputeFactory, hash_files

WAIT_S = 20.0  # for what should happen at once, or when a deadline passes
NUM_BLOCKS = 64

HEARTBEAT_S, TRANSFER_TIMEOUT_S, RESERVE_TIMEOUT_S = 0.1, 0.8, 1.2
_LOOK_AGAIN_S = 0.005  # nothing tells when a status changes

# Of a node, for each peer it met: sockets both ways, its pidfd, and what the transport maps, or the
# agent of nixl that is made for it.
_DESCRIPTORS_PER_PEER = 8
_DESCRIPTORS_PER_NODE = 8  # that come with the first transfer
_THREADS_PER_NODE = 4  # that come with it too: to copy, to make checksums, to be late
_THREADS_OF_LOOP = 6  # in which tests do what takes a while


class _Usage(NamedTuple):
    """Of a process."""

    descriptors: int
    threads: int


class Shape(NamedTuple):
    """How many nodes of each kind there are."""

    prefill: int = 2
    decode: int = 2


def fault_config(
    transport: TransportChoice,
    plan: FaultPlan | None,
    shape: Shape,
    *,
    on_transfer_failure: OnTransferFailure = "retry",
    layerwise: bool = False,
) -> LocalConfig:
    return LocalConfig(
        topology=Topology.DISAGGREGATED,
        processes=transport is not TransportChoice.MEMORY,
        num_prefill=shape.prefill,
        num_decode=shape.decode,
        max_model_len=512,
        num_blocks=NUM_BLOCKS,
        scheduler=SchedulerKnobs(max_num_seqs=8, max_num_batched_tokens=64),
        transfer=TransferConfig(
            transport=transport,
            on_transfer_failure=on_transfer_failure,
            layerwise=layerwise,
            heartbeat_s=HEARTBEAT_S,
            transfer_timeout_s=TRANSFER_TIMEOUT_S,
            reserve_timeout_s=RESERVE_TIMEOUT_S,
            faults=plan,
        ),
        router=RouterConfig(default_prefill_tokens_per_s=1e5),
    )


class FaultCluster(ABC):
    """What tests do to a cluster, and ask of it. Dead nodes are asked nothing."""

    has_processes: bool  # each node has one of its own

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self._usage_before: dict[str, _Usage] = {}

    @property
    @abstractmethod
    def dispatcher(self) -> Dispatcher: ...

    @property
    @abstractmethod
    def _nodes(self) -> Sequence[EngineNode | RemoteNode]: ...

    @abstractmethod
    async def kill(self, node_id: str) -> None:
        """At once, with no last words."""

    @abstractmethod
    def stop(self, node_id: str) -> None:
        """It does nothing any more, but is there."""

    @abstractmethod
    def go_on(self, node_id: str) -> None: ...

    @property
    def living(self) -> dict[str, EngineNode | RemoteNode]:
        return {n.info.node_id: n for n in self._nodes if n.info.node_id not in self.dead}

    def living_of(self, role: str) -> list[str]:
        return [node_id for node_id in self.living if node_id.startswith(role)]

    # ------------------------------------------------------------------ requests

    async def submit(
        self, request_id: str, prompt: Sequence[int], sampling: SamplingParams
    ) -> TokenStream:
        return await self.dispatcher.submit(
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                arrival_time=time.time(),
            )
        )

    async def retries(self) -> Counter[str]:
        return Counter((await self.dispatcher.status()).retries)

    # ------------------------------------------------------------------ looking

    async def statuses(self, *without: str) -> dict[str, NodeStatus]:
        return {i: await node.status() for i, node in self.living.items() if i not in without}

    async def transfers(self, request_id: str, *without: str) -> dict[str, LiveTransfer]:
        """The ends of the first attempt's hand-off, by their nodes."""
        return {
            node_id: transfer
            for node_id, status in (await self.statuses(*without)).items()
            for transfer in status.transfers.live
            if transfer.ticket == f"{request_id}/0"
        }

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not await condition():
            assert time.monotonic() < deadline, await self.describe()
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def at_rest(self) -> None:
        """No living node has anything of any request, and all blocks are accounted for."""

        async def rests() -> bool:
            statuses = await self.statuses()
            assert all(status.blocks.balanced for status in statuses.values()), statuses
            return not any(map(process_cluster.is_busy, statuses.values()))

        await self.until(rests)

    async def describe(self) -> str:
        return "\n".join(f"{node_id}: {s}" for node_id, s in (await self.statuses()).items())

    @abstractmethod
    def _pids(self) -> dict[str, int]:
        """Of the processes that are not dead, by what they are."""

    def resident_bytes(self) -> dict[str, int]:
        """Without files and shared memory: blocks of a pool are taken when they are first used."""
        page = os.sysconf("SC_PAGE_SIZE")
        sizes = {}
        for what, pid in self._pids().items():
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            sizes[what] = (int(resident) - int(shared)) * page
        return sizes

    def _usage(self) -> dict[str, _Usage]:
        return {
            what: _Usage(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))
            for what, pid in self._pids().items()
        }

    def note_usage(self) -> None:
        """Before anything was transferred."""
        self._usage_before = self._usage()

    def check_usage(self) -> None:
        """No more than every peer may cost, however many transfers have gone wrong."""
        peers = len(self._nodes)
        more_descriptors = _DESCRIPTORS_PER_NODE + _DESCRIPTORS_PER_PEER * peers
        more_threads = _THREADS_PER_NODE * (1 if self.has_processes else peers) + _THREADS_OF_LOOP
        for what, usage in self._usage().items():
            before = self._usage_before[what]
            assert usage.descriptors <= before.descriptors + more_descriptors, f"{what}: {usage}"
            assert usage.threads <= before.threads + more_threads, f"{what}: {usage}"


class MemoryCluster(FaultCluster):
    """All nodes in this process: a node is killed by its transport and its engine."""

    has_processes = False

    def __init__(self, config: LocalConfig) -> None:
        super().__init__()
        self.local = LocalCluster(config, hash_files(), HashComputeFactory(NUM_BLOCKS))
        self._stopped: dict[str, threading.Event] = {}

    @property
    def dispatcher(self) -> Dispatcher:
        return self.local.dispatcher

    @property
    def _nodes(self) -> Sequence[EngineNode]:
        return self.local.nodes

    def _node(self, node_id: str) -> EngineNode:
        return next(node for node in self.local.nodes if node.info.node_id == node_id)

    async def kill(self, node_id: str) -> None:
        node = self._node(node_id)
        self.dead.add(node_id)
        connector = node.host.engine.connector
        await asyncio.to_thread(connector._transport.close)  # type: ignore[union-attr]
        await asyncio.to_thread(stop_node, node)

    def stop(self, node_id: str) -> None:
        event = self._stopped[node_id] = threading.Event()
        self._node(node_id).host.post(lambda: _wait(event))

    def go_on(self, node_id: str) -> None:
        if node_id in self._stopped:
            self._stopped.pop(node_id).set()

    def _pids(self) -> dict[str, int]:
        return {"the test": os.getpid()}


def _wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S), "the node was never let go on"


class ProcessesCluster(FaultCluster):
    """Each node in a process of its own."""

    has_processes = True

    def __init__(self, cluster: ProcessCluster) -> None:
        super().__init__()
        self._cluster = cluster

    @property
    def dispatcher(self) -> Dispatcher:
        return self._cluster.dispatcher

    @property
    def _nodes(self) -> Sequence[RemoteNode]:
        return self._cluster.nodes

    def _pid(self, node_id: str) -> int:
        return next(node.pid for node in self._cluster.nodes if node.info.node_id == node_id)

    async def kill(self, node_id: str) -> None:
        self.dead.add(node_id)
        os.kill(self._pid(node_id), signal.SIGKILL)

    def stop(self, node_id: str) -> None:
        os.kill(self._pid(node_id), signal.SIGSTOP)

    def go_on(self, node_id: str) -> None:
        os.kill(self._pid(node_id), signal.SIGCONT)

    def _pids(self) -> dict[str, int]:
        return {"the test": os.getpid()} | {i: self._pid(i) for i in self.living}


@contextlib.asynccontextmanager
async def running(config: LocalConfig) -> AsyncIterator[FaultCluster]:
    """Started; afterwards stopped, and no thread, task, descriptor or process is left."""
    cluster: FaultCluster
    if config.processes:
        async with process_cluster.running(config) as processes:
            cluster = ProcessesCluster(processes)
            cluster.note_usage()
            yield cluster
        return
    before = _resources()
    cluster = MemoryCluster(config)
    await cluster.local.start()
    try:
        cluster.note_usage()
        yield cluster
    finally:
        await cluster.local.stop()
    assert _resources() == before, "threads, tasks or descriptors are left"


def _resources() -> tuple[set[str], int, int]:
    threads = {t.name for t in threading.enumerate() if not t.name.startswith("asyncio_")}
    tasks = len([t for t in asyncio.all_tasks() if not t.done()])
    return threads, tasks, len(os.listdir("/proc/self/fd"))
