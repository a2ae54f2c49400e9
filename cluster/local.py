"""The whole cluster in one process: nodes, directory and router, without Ray and without servers.

Dispatcher ──► prefill nodes ══ MemoryHub ══► decode nodes      each with its own thread,
    └───────── MemoryDirectory ◄──┴───────────────┘             scheduler and KV pool
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import LocalConfig
from decode_node import LocalDecodeNode
from directory import Directory, MemoryDirectory
from engine import Engine, EngineHost, KVCacheConfig, PipelinedEngine, StepRunner
from engine.weights import ModelFiles
from kv_transfer import (
    BlockLayout,
    BlockPoolMemory,
    HandoffConfig,
    HandoffConnector,
    MemoryHub,
    MemoryTransport,
    Transport,
)
from prefill_node import LocalPrefillNode
from protocol import BlockEventBatch, ConfigError, NodeInfo, NodeStatus, Role
from router import Dispatcher
from scheduler import CacheConfig, Scheduler, SchedulerConfig
from scheduler.record import open_recording
from scheduler.recording import RecordingScheduler

NODE_TTL_S = 30.0  # a step may take a second; a node silent for so long is not well


@dataclass(frozen=True)
class NodeCompute:
    """What computes on a node, and the memory that its blocks are in."""

    runner: StepRunner
    kv_cache: KVCacheConfig
    address: int
    owner: object


RunnerFactory = Callable[[], NodeCompute]
TransportFactory = Callable[[MemoryHub, str], Transport]


@dataclass(frozen=True)
class _DirectoryListener:
    """Tells a directory in this process what a node does."""

    directory: Directory

    def on_status(self, info: NodeInfo, status: NodeStatus) -> None:
        self.directory.heartbeat(status, generation=info.generation)

    def on_blocks(self, info: NodeInfo, batch: BlockEventBatch) -> None:
        self.directory.publish(batch, generation=info.generation)


class LocalCluster:
    """Builds the nodes; `start` and `stop` belong to one event loop."""

    def __init__(
        self,
        config: LocalConfig,
        files: ModelFiles,
        make_compute: RunnerFactory,
        *,
        handoff: HandoffConfig | None = None,
        make_transport: TransportFactory | None = None,
    ) -> None:
        self.config = config
        self.files = files
        self._make_compute = make_compute
        self._handoff = handoff or HandoffConfig()
        self._make_transport = make_transport or self._memory_transport
        self._hub = MemoryHub()
        self._directory = MemoryDirectory()
        self._listener = _DirectoryListener(self._directory)
        self.prefill_nodes: list[LocalPrefillNode] = []
        self.decode_nodes: list[LocalDecodeNode] = []
        self._recordings: list[RecordingScheduler] = []
        for role, num_nodes in config.num_nodes.items():
            for number in range(num_nodes):
                self._add_node(role, number)
        self.dispatcher = Dispatcher(
            self._directory,
            files.fingerprint,
            self.prefill_nodes,
            self.decode_nodes,
            config.router,
        )

    @property
    def nodes(self) -> list[LocalPrefillNode | LocalDecodeNode]:
        return [*self.prefill_nodes, *self.decode_nodes]

    async def start(self) -> None:
        for node in self.nodes:
            self._directory.register(node.info, ttl_s=NODE_TTL_S)
            node.start()
        await self.dispatcher.start()

    async def stop(self) -> None:
        """Returns when no thread of ours is left."""
        await self.dispatcher.stop()
        for node in self.nodes:
            node.ask_stop()
        for node in self.nodes:
            node.stop()
            self._directory.deregister(node.info.node_id, generation=node.info.generation)
        for recording in self._recordings:
            recording.close()

    def _add_node(self, role: Role, number: int) -> None:
        parts = self._make_parts(f"{role}-{number}", role)
        if role is Role.PREFILL:
            self.prefill_nodes.append(LocalPrefillNode(*parts))
        else:
            self.decode_nodes.append(LocalDecodeNode(*parts, self.config.decode))

    def _make_parts(self, node_id: str, role: Role) -> tuple[EngineHost, HandoffConnector]:
        compute = self._make_compute()
        transport = self._make_transport(self._hub, node_id)
        connector = HandoffConnector(transport, time.monotonic, self._handoff)
        cache = CacheConfig(
            num_blocks=compute.kv_cache.num_blocks,
            block_size=compute.kv_cache.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        settings = self.config.scheduler_config(role, self.files.config, cache.num_usable_blocks)
        scheduler = self._make_scheduler(node_id, settings, cache, connector)
        engine: Engine
        if settings.async_scheduling:
            name = f"engine-{node_id}"
            engine = PipelinedEngine(scheduler, compute.runner, connector, name=name)
        else:
            engine = Engine(scheduler, compute.runner, connector)
        info = self._make_info(node_id, role, transport.endpoint, scheduler)
        host = EngineHost(info, engine, self._listener)
        pool = BlockPoolMemory(
            self._layout(compute.kv_cache),
            compute.address,
            compute.kv_cache.num_blocks,
            compute.owner,
        )
        connector.register_kv_caches(pool, host.wake)
        return host, connector

    def _make_scheduler(
        self,
        node_id: str,
        settings: SchedulerConfig,
        cache: CacheConfig,
        connector: HandoffConnector,
    ) -> Scheduler:
        directory = self.config.record_schedules
        if directory is None:
            return Scheduler(settings, cache, connector)
        try:
            stream = open_recording(directory / f"{node_id}.json")
        except OSError as error:
            raise ConfigError("record_schedules", f"cannot be written: {error}") from error
        recording = RecordingScheduler(settings, cache, connector, stream=stream, name=node_id)
        self._recordings.append(recording)
        return recording

    def _make_info(self, node_id: str, role: Role, endpoint: str, scheduler: Scheduler) -> NodeInfo:
        return NodeInfo(
            node_id=node_id,
            role=role,
            model=self.files.name,
            fingerprint=self.files.fingerprint,
            endpoint=endpoint,
            block_size=scheduler.kv.config.block_size,
            num_blocks=scheduler.kv.config.num_usable_blocks,
            max_model_len=scheduler.config.max_model_len,
            max_num_seqs=scheduler.config.max_num_seqs,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
        )

    def _layout(self, kv_cache: KVCacheConfig) -> BlockLayout:
        return BlockLayout(
            fingerprint=self.files.fingerprint,
            dtype=kv_cache.dtype,
            block_size=kv_cache.block_size,
            num_layers=kv_cache.num_layers,
            num_kv_heads=kv_cache.num_kv_heads,
            head_dim=kv_cache.head_dim,
            bytes_per_block=kv_cache.bytes_per_block,
        )

    def _memory_transport(self, hub: MemoryHub, node_id: str) -> Transport:
        return MemoryTransport(hub, node_id, checksums=self.config.checksums)
