"""One node from its parts, whatever process it runs in.

compute ─► pool ─► transport ─► connector ─► scheduler ─► engine ─► host ─► node
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.config import LocalConfig
from cluster.engine_node import EngineNode, NodeRoles
from cluster.node_compute import NodeCompute, RunnerFactory
from engine import Engine, EngineHost, KVCacheConfig, Listener, PipelinedEngine
from engine.weights import ModelFiles
from kv_transfer import (
    BlockLayout,
    BlockPoolMemory,
    ConnectorContext,
    HandoffConfig,
    HandoffConnector,
    KVConnector,
    MultiConnector,
    Transport,
    load_connector,
)
from protocol import ConfigError, NodeInfo, Role
from scheduler import CacheConfig, Scheduler, SchedulerConfig
from scheduler.record import open_recording
from scheduler.recording import RecordingScheduler


@dataclass(frozen=True, kw_only=True)
class NodeBuilder:
    """What all nodes of a cluster have in common, or all of those that one process builds."""

    config: LocalConfig
    files: ModelFiles
    make_compute: RunnerFactory
    make_transport: Callable[[str], Transport]  # from the node's id
    listener: Listener
    handoff: HandoffConfig | None = None  # None: as configured
    roles_change: bool = False  # nodes get other roles, or neighbours of other roles, as they live

    def build(self, role: Role, node_id: str, generation: int = 0) -> EngineNode:
        """A node that is not started.

        Raises:
            ConfigError: a setting does not go with this machine or this model.
            ModelError: the weights cannot be loaded.
        """
        compute = self.make_compute(role)
        transport = self.make_transport(node_id)
        handoff = HandoffConnector(
            transport, time.monotonic, self.handoff or self.config.transfer.handoff()
        )
        connector = self._with_others(handoff, role, node_id)
        # Decided once: an engine stays what it is when the node's role changes.
        settings = partial(
            self.config.scheduler_config,
            model=self.files.config,
            num_blocks=compute.kv_cache.num_blocks - 1,
            plans_ahead=self._plans_ahead(role),
        )
        scheduler = self._make_scheduler(node_id, settings(role), compute.kv_cache, connector)
        info = self._make_info(role, node_id, generation, transport.endpoint, scheduler)
        host = EngineHost(
            info,
            _engine(node_id, scheduler, compute, connector),
            self.listener,
            max_quarantine=self.config.transfer.quarantine_limit(info.num_blocks),
        )
        connector.register_kv_caches(self._pool(compute), host.wake)
        return EngineNode(
            host,
            NodeRoles(
                connector=handoff,
                decode=self.config.decode,
                scheduler_config=settings,
            ),
        )

    def _plans_ahead(self, role: Role) -> bool:
        """Whether a node that is built in this role does, where nobody has said it.

        A step on a CPU is so long that planning costs nothing beside it, and a request that comes
        meanwhile waits for one more step if the next one is planned already. That is worth it only
        where KV is moved while steps are computed: by a connector, or to and from other nodes.
        """
        config = self.config
        moves_kv = bool(config.transfer.connectors) or self.roles_change
        only_unified = role is Role.UNIFIED and set(config.num_nodes) == {Role.UNIFIED}
        return config.engine.is_cuda or moves_kv or not only_unified

    def _with_others(self, handoff: HandoffConnector, role: Role, node_id: str) -> KVConnector:
        """The hand-off goes first: KV that comes from a prefill node is all that is needed."""
        others = []
        for spec in self.config.transfer.connectors:
            context = ConnectorContext(
                node_id,
                role,
                self.config.cache_size(role).block_size,
                self.config.fingerprint(self.files),
                spec.options,
            )
            others.append(_load(spec.path, context))
        return MultiConnector([handoff, *others]) if others else handoff

    def _make_scheduler(
        self,
        node_id: str,
        settings: SchedulerConfig,
        kv_cache: KVCacheConfig,
        connector: KVConnector,
    ) -> Scheduler:
        cache = CacheConfig(
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        if self.config.record_schedules is None:
            return Scheduler(settings, cache, connector)
        return self._make_recording(node_id, settings, cache, connector)

    def _make_recording(
        self,
        node_id: str,
        settings: SchedulerConfig,
        cache: CacheConfig,
        connector: KVConnector,
    ) -> RecordingScheduler:
        assert self.config.record_schedules is not None
        try:
            stream = open_recording(self.config.record_schedules / f"{node_id}.json")
        except OSError as error:
            raise ConfigError("record_schedules", f"cannot be written: {error}") from error
        return RecordingScheduler(settings, cache, connector, stream=stream, name=node_id)

    def _make_info(
        self, role: Role, node_id: str, generation: int, endpoint: str, scheduler: Scheduler
    ) -> NodeInfo:
        return NodeInfo(
            node_id=node_id,
            role=role,
            model=self.files.name,
            fingerprint=self.config.fingerprint(self.files),
            endpoint=endpoint,
            block_size=scheduler.kv.config.block_size,
            num_blocks=scheduler.kv.config.num_usable_blocks,
            max_model_len=scheduler.config.max_model_len,
            max_num_seqs=scheduler.config.max_num_seqs,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            generation=generation,
        )

    def _pool(self, compute: NodeCompute) -> BlockPoolMemory:
        kv_cache = compute.kv_cache
        layout = BlockLayout(
            fingerprint=self.config.fingerprint(self.files),
            dtype=kv_cache.dtype,
            block_size=kv_cache.block_size,
            num_layers=kv_cache.num_layers,
            num_kv_heads=kv_cache.num_kv_heads,
            head_dim=kv_cache.head_dim,
            bytes_per_block=kv_cache.bytes_per_block,
        )
        return BlockPoolMemory(
            layout,
            compute.address,
            kv_cache.num_blocks,
            compute.owner,
            compute.fd,
            kv_cache.device,
            compute.copier,
        )


def _load(path: str, context: ConnectorContext) -> KVConnector:
    """Raises ConfigError about `connectors`, also if it is one of the connector's own options."""
    try:
        return load_connector(path, context)
    except ConfigError as error:
        if error.field == "connectors":
            raise
        raise ConfigError("connectors", f"{path}: options.{error}") from error


def stop_node(node: EngineNode) -> None:
    """Returns when its threads have ended, and what it recorded is written."""
    node.stop()
    scheduler = node.host.engine.scheduler
    if isinstance(scheduler, RecordingScheduler):
        scheduler.close()


def _engine(
    node_id: str, scheduler: Scheduler, compute: NodeCompute, connector: KVConnector
) -> Engine:
    if scheduler.config.async_scheduling:
        return PipelinedEngine(scheduler, compute.runner, connector, name=f"engine-{node_id}")
    return Engine(scheduler, compute.runner, connector)
