"""A prefill, decode or unified node as a Ray actor.

    start ─► builds the node, listens, registers ─► run … ─► its process ends, or its engine does
                                                     └─ drain, undrain, change_role, stop

Its callers are gateways, which reach it through `NodeService`; Ray's calls are the controller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace

import msgspec

from cluster.config import LocalConfig
from cluster.directory_listener import DirectoryListener
from cluster.engine_node import EngineNode
from cluster.node_builder import stop_node
from cluster.node_messages import Setup
from cluster.node_service import NodeService
from cluster.node_setup import build_node, set_up_logging, use_modules
from cluster.ray_mode.connect_directory import tell_directory
from cluster.ray_mode.member_actor import MemberActor
from cluster.ray_mode.spec import Done, Failed, NodePlan, NodeStarted, pack, unpack
from directory import Directory, DirectoryError, StaleGeneration
from engine.weights import ModelFiles, ModelStore
from kv_transfer.peering import ClusterToken
from protocol import (
    BlockEventBatch,
    KvrelayError,
    ModelError,
    NodeInfo,
    NodeStatus,
    Role,
)

logger = logging.getLogger(__name__)


class NodeActor(MemberActor["_RunningNode"]):
    def __init__(self, plan: bytes, host_address: str) -> None:
        super().__init__()
        told = unpack(plan)
        assert isinstance(told, NodePlan), told
        self._plan = told
        self._host_address = host_address
        use_modules(told.spec.module_path)
        set_up_logging(told.node_id, told.spec.log_level)

    async def _bring_up(self) -> _RunningNode:
        return await _start_node(self._plan, self._host_address)

    def _describe(self) -> NodeStarted:
        return NodeStarted(self._running.service.info, self._host_address, os.getpid())

    async def run(self) -> str:
        """Returns when the node has ended by itself; what it died of. Mostly, the process ends."""
        return await self._running.follower.ended()

    async def drain(self, timeout_s: float | None) -> bytes:
        await self._running.node.drain(timeout_s)
        return pack(Done())

    async def undrain(self) -> bytes:
        await self._running.node.undrain()
        return pack(Done())

    async def change_role(self, role: str) -> bytes:
        """NodeStarted with what it is now, or Failed. Jobs under way are waited for."""
        try:
            await self._running.service.change_role(Role(role))
        except (KvrelayError, TimeoutError) as error:
            return pack(Failed.of(error))
        return pack(self._describe())


@dataclass
class _RunningNode:
    node: EngineNode
    service: NodeService
    follower: NodeFollower
    directory: Directory

    async def stop(self) -> None:
        """Leave the directory, and then stop."""
        self.follower.leaving = True
        self.directory.deregister(
            self.service.info.node_id, generation=self.service.info.generation
        )
        await self.service.stop()
        await asyncio.to_thread(stop_node, self.node)
        await asyncio.to_thread(self.directory.close)


class NodeFollower:
    """The `Listener` of a node: tells the directory, and notices that the node has ended."""

    def __init__(self, directory: Directory, ttl_s: float) -> None:
        self._teller = DirectoryListener(directory, ttl_s)
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str] = self._loop.create_future()
        self.leaving = False

    def register(self, info: NodeInfo) -> None:
        """Takes a round trip. Raises StaleGeneration."""
        self._teller.register(info)

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    def on_status(self, info: NodeInfo, status: NodeStatus) -> None:
        if self.leaving:  # it is not registered any more
            return
        if not status.healthy:
            self._finish("its engine has ended")
        try:
            self._teller.on_status(info, status)
        except DirectoryError as error:  # another has taken its place, or somebody has removed it
            self._finish(str(error))

    def on_blocks(self, info: NodeInfo, batch: BlockEventBatch) -> None:
        self._teller.on_blocks(info, batch)

    def _finish(self, why: str) -> None:
        def finish() -> None:
            if not self._end.done():
                self._end.set_result(why)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self._loop.call_soon_threadsafe(finish)


async def _start_node(plan: NodePlan, host_address: str) -> _RunningNode:
    """Raises ConfigError, ModelError, DirectoryError: what is not as it has to be on this host."""
    spec = plan.spec
    async with contextlib.AsyncExitStack() as on_failure:
        directory = await asyncio.to_thread(tell_directory, spec, plan.directory)
        on_failure.callback(directory.close)
        follower = NodeFollower(directory, spec.directory.node_ttl_s)
        transfer = spec.config.transfer.bound(host_address)
        node = await asyncio.to_thread(
            _build, plan, replace(spec.config, transfer=transfer), follower
        )
        on_failure.callback(stop_node, node)

        def in_thread(info: NodeInfo) -> None:
            asyncio.get_running_loop().run_in_executor(None, _register_again, follower, node, info)

        service = NodeService(
            node,
            ClusterToken(spec.token.value),
            bind=transfer.bind,
            on_new_info=in_thread,
        )
        await service.start()
        on_failure.push_async_callback(service.stop)
        await asyncio.to_thread(_register_first, follower, node, service)
        node.start()
        on_failure.pop_all()
    logger.info("serves at %s", service.endpoint)
    return _RunningNode(node, service, follower, directory)


def _register_first(follower: NodeFollower, node: EngineNode, service: NodeService) -> None:
    try:
        follower.register(service.info)
    except StaleGeneration as error:  # the clock of the host where it was before is fast
        node.host.info = msgspec.structs.replace(node.info, generation=error.current + 1)
        follower.register(service.info)


def _register_again(follower: NodeFollower, node: EngineNode, info: NodeInfo) -> None:
    """With its status, which the next heartbeat would bring a second later."""
    follower.register(info)
    follower.on_status(info, node.host.status())


def _build(plan: NodePlan, config: LocalConfig, follower: NodeFollower) -> EngineNode:
    spec = plan.spec
    files = ModelStore(spec.serve.cache_dir).resolve(spec.serve.model)
    _check_model(files, spec.fingerprint)
    cores = spec.config.cores(plan.role)
    setup = Setup(
        role=plan.role,
        node_id=plan.node_id,
        generation=time.time_ns() // 1_000_000,  # later than that of any earlier process
        config=config,
        files=files,
        compute=spec.compute,
        token=spec.token,
        threads=cores.num_threads(len(os.sched_getaffinity(0)), plan.nodes_on_host),
        cpus=cores.cpus,
        module_path=spec.module_path,
        log_level=spec.log_level,
        roles_change=True,  # by `kvrelay role`, and by `kvrelay scale` the roles of others
    )
    return build_node(setup, follower)


def _check_model(files: ModelFiles, fingerprint: str) -> None:
    """Raises ModelError: this host has another model under that name."""
    if files.fingerprint != fingerprint:
        raise ModelError(
            f"{files.name} at {files.directory} has fingerprint {files.fingerprint}, and the "
            f"cluster's has {fingerprint}: this host has another model under that name",
            path=str(files.directory),
        )
