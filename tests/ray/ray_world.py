"""A cluster of hash-model nodes on Ray, and a gateway of the test's own beside those on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster import LocalConfig, TransferConfig, TransportChoice
from cluster.autoscaling_config import AutoscalingConfig
from cluster.config import ServeConfig
from cluster.connected_node import connect_node
from cluster.directory_config import DirectoryConfig
from cluster.free_port import free_port
from cluster.membership import Membership
from cluster.ray_config import GatewayReplicas, NodeResources, RayConfig
from cluster.ray_mode.connect_directory import follow_directory
from cluster.ray_mode.local_ray import KnownCluster, RayFailed
from cluster.ray_mode.memory import MemoryStore
from cluster.ray_mode.ray_cluster import RayCluster, connect
from cluster.ray_mode.spec import (
    CONTROLLER,
    ClusterReport,
    MemberReport,
    MemberState,
    Spec,
    namespace,
)
from cluster.secret import Secret
from directory.redis_directory import RedisDirectory
from engine.weights import ModelStore
from gateway import GatewayConfig
from kv_transfer.peering import ClusterToken
from protocol import BlockHash, KvrelayError, NodeStatus, Role
from router import Dispatcher, RouterConfig
from scheduler import SchedulerKnobs
from tests.process_cluster import is_busy
from tests.ray.ray_head import pid_of_actor, wait_until

WHOLE_S = 30.0  # the cluster is as before within, whatever has died
_REST_S = 30.0
_POLL_S = 0.1
_TOKEN = Secret("a token of this test")
_numbers = itertools.count()


def make_spec(
    head: KnownCluster | None,
    model: Path | str,
    *,
    name: str | None = None,
    prefill: int = 1,
    decode: int = 1,
    unified: int = 0,
    gateways: int = 0,
    port: int | None = None,
    directory: DirectoryConfig | None = None,
    directory_password: str | None = None,
    ray: RayConfig | None = None,
    num_cpus: float = 0.1,
    max_restarts: int | None = None,
    compute: str = "slow_hash_compute",
    fingerprint: str | None = None,
) -> Spec:
    """A port of None: any that is free; of 0: the gateway finds one."""
    cache_dir = Path("nowhere")
    files = None if fingerprint is not None else ModelStore(cache_dir).resolve(str(model))
    return Spec(
        name=name or f"test-{os.getpid()}-{next(_numbers)}",
        config=LocalConfig(
            processes=True,
            num_prefill=prefill,
            num_decode=decode,
            num_unified=unified,
            max_model_len=512,
            num_blocks=96,
            scheduler=SchedulerKnobs(max_num_seqs=8, max_num_batched_tokens=64),
            transfer=TransferConfig(
                transport=TransportChoice.SHM,
                reserve_timeout_s=20,
                transfer_timeout_s=10,
                heartbeat_s=1,
            ),
            router=ROUTER,
        ),
        serve=ServeConfig(
            port=free_port("127.0.0.1") if port is None else port,
            cache_dir=cache_dir,
            model=str(model),
        ),
        fingerprint=fingerprint or (files.fingerprint if files else ""),
        ray=ray
        or RayConfig(
            address=None if head is None else head.address,
            health_interval_s=0.5,
            health_timeout_s=5,
            start_timeout_s=60,
        ),
        resources={
            role: NodeResources(num_cpus=num_cpus, max_restarts=max_restarts) for role in Role
        },
        gateways=GatewayReplicas(count=gateways),
        gateway=GatewayConfig(),
        directory=directory or DirectoryConfig(node_ttl_s=3),
        directory_password=None if directory_password is None else Secret(directory_password),
        autoscaling=AutoscalingConfig(),
        token=_TOKEN,
        compute=f"tests.hash_compute:{compute}",
        module_path=tuple(sys.path),
        log_level=logging.WARNING,
    )


ROUTER = RouterConfig(default_prefill_tokens_per_s=1e5, admission_wait_s=WHOLE_S)


@contextlib.contextmanager
def up(spec: Spec, state_dir: Path) -> Iterator[RayWorld]:
    """A cluster that serves; afterwards it has ended, and none of its processes is left."""
    cluster = RayCluster.up(spec, state_dir, on_progress=lambda stage: None)
    world = RayWorld(cluster, spec, state_dir)
    try:
        yield world
    finally:
        world.connect()
        pids = [member.pid for member in world.members().values()]
        cluster.down()
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not left, f"processes are left: {left}"


@contextlib.contextmanager
def connected_to(head: KnownCluster, name: str) -> Iterator[None]:
    """A driver of this Ray."""
    connect(head.address, name)
    yield


@dataclass(frozen=True)
class Killed:
    """Who was killed or stopped, and what it was."""

    name: str
    pid: int
    generation: int  # of a node


class RayWorld:
    """The whole of it, from outside. What may take long runs in a thread."""

    def __init__(self, cluster: RayCluster, spec: Spec, state_dir: Path) -> None:
        self.cluster = cluster
        self.spec = spec
        self.state_dir = state_dir

    def connect(self) -> None:
        """Be its driver again, if another cluster of this process has let go of Ray."""
        connect(self.cluster.known.address, self.spec.name)

    def restore(self) -> None:
        """As many nodes as at first, and all of them ready."""
        wanted = self.spec.config.num_nodes
        if self.report().targets != wanted:
            self.cluster.scale(wanted, 0.0)
        assert wait_until(lambda: not self._problems(()), WHOLE_S), self._problems(())

    # ------------------------------------------------------------------ looking

    def report(self) -> ClusterReport:
        return self.cluster.report()

    def members(self) -> dict[str, MemberReport]:
        return {member.name: member for member in self.report().members}

    def pid(self, name: str) -> int:
        if name == CONTROLLER:
            return pid_of_actor(CONTROLLER, namespace(self.spec.name))
        return self.members()[name].pid

    @property
    def url(self) -> str:
        return f"http://{self.spec.serve.host}:{self.spec.serve.port}/v1"

    # ------------------------------------------------------------------ killing

    def kill(self, *names: str) -> list[Killed]:
        """All at the same moment."""
        return self._signal(signal.SIGKILL, *names)

    def stop(self, *names: str) -> list[Killed]:
        """They do nothing any more, but are there."""
        return self._signal(signal.SIGSTOP, *names)

    def go_on(self, stopped: Killed) -> None:
        """It may have ended by now."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped.pid, signal.SIGCONT)

    def _signal(self, number: signal.Signals, *names: str) -> list[Killed]:
        killed = self.aim_at(*names)
        self.send(number, killed)
        return killed

    @staticmethod
    def send(number: signal.Signals, to: Sequence[Killed]) -> None:
        for one in to:
            os.kill(one.pid, number)

    def aim_at(self, *names: str) -> list[Killed]:
        """To be killed by whoever has no time to ask who they are."""
        members = self.members()
        killed = []
        for name in names:
            info = None if name == CONTROLLER else members[name].info
            killed.append(Killed(name, self.pid(name), 0 if info is None else info.generation))
        return killed

    async def whole_again(self, killed: Sequence[Killed], gateway: OwnGateway | None) -> None:
        """Every process is there, those that were killed as new ones; within `WHOLE_S`."""
        until = time.monotonic() + WHOLE_S
        while problems := await asyncio.to_thread(self._problems, killed):
            assert time.monotonic() < until, problems
            await asyncio.sleep(_POLL_S)
        if gateway is not None:
            await gateway.meet(self.members(), until)

    def _problems(self, killed: Sequence[Killed]) -> list[str]:
        try:
            members = self.members()
            if any(one.name == CONTROLLER and self.pid(CONTROLLER) == one.pid for one in killed):
                return ["the controller was not replaced"]
        except (RayFailed, KvrelayError, LookupError) as error:
            return [f"the controller: {error}"]
        known = {*self.names(), *(one.name for one in killed)} - {CONTROLLER}
        problems = [f"{name} is missing" for name in known - members.keys()]
        problems += [
            f"{member.name} is {member.state}: {member.problem}"
            for member in members.values()
            if member.state is not MemberState.READY
        ]
        for one in killed:
            member = members.get(one.name)
            if member is None:
                continue
            if member.pid == one.pid:
                problems.append(f"{one.name} was not replaced")
            elif member.info is not None and member.info.generation <= one.generation:
                problems.append(f"{one.name} has generation {member.info.generation}")
        return problems

    def names(self) -> set[str]:
        memory = MemoryStore(self.spec.name).load()
        assert memory is not None
        return {*memory.nodes, *memory.gateways}

    @property
    def gateways(self) -> tuple[str, ...]:
        memory = MemoryStore(self.spec.name).load()
        assert memory is not None
        return memory.gateways

    # ------------------------------------------------------------------ a gateway of our own

    def directory(self) -> RedisDirectory:
        """That of the cluster; to be closed."""
        memory = MemoryStore(self.spec.name).load()
        assert memory is not None
        return follow_directory(self.spec, memory.directory, need_server=True)

    @contextlib.asynccontextmanager
    async def own_gateway(self, router: RouterConfig = ROUTER) -> AsyncIterator[OwnGateway]:
        """In this process, outside of Ray; connected to all nodes."""
        directory = await asyncio.to_thread(self.directory)
        dispatcher = Dispatcher(directory, self.spec.fingerprint, config=router)
        dial = partial(connect_node, token=ClusterToken(_TOKEN.value))
        membership = Membership(directory, dispatcher, dial, fingerprint=self.spec.fingerprint)
        try:
            await dispatcher.start()
            await membership.start()
            gateway = OwnGateway(dispatcher, directory)
            await gateway.meet(await asyncio.to_thread(self.members))
            yield gateway
        finally:
            await membership.stop()
            await dispatcher.stop()
            await asyncio.to_thread(directory.close)


@dataclass(frozen=True)
class OwnGateway:
    """The part of a gateway that speaks with nodes."""

    dispatcher: Dispatcher
    directory: RedisDirectory

    async def meet(self, members: Mapping[str, MemberReport], until: float | None = None) -> None:
        """Until the dispatcher may use every node as it is now, and no other."""
        until = until or time.monotonic() + WHOLE_S
        wanted = {
            member.info.node_id: (member.info.role, member.info.generation)
            for member in members.values()
            if member.info is not None
        }
        while (now := self._usable()) != wanted:
            assert time.monotonic() < until, f"{now} is not {wanted}"
            await asyncio.sleep(_POLL_S)

    def _usable(self) -> dict[str, tuple[Role, int]]:
        views = self.dispatcher._cluster.nodes(self.dispatcher._roster.contacts())
        return {
            view.info.node_id: (view.info.role, view.info.generation)
            for view in views
            if view.connected and view.alive
        }

    async def statuses(self) -> dict[str, NodeStatus | None]:
        reports = (await self.dispatcher.status()).nodes
        return {report.info.node_id: report.status for report in reports}

    async def at_rest(self) -> dict[str, NodeStatus]:
        """No node has anything of any request, and each block is accounted for."""
        until = time.monotonic() + _REST_S
        while True:
            statuses = {i: s for i, s in (await self.statuses()).items() if s is not None}
            assert all(status.blocks.balanced for status in statuses.values()), statuses
            busy = {i: status for i, status in statuses.items() if is_busy(status)}
            if not busy and len(statuses) == len(self.dispatcher.node_ids):
                return statuses
            assert time.monotonic() < until, busy or statuses
            await asyncio.sleep(_POLL_S)

    async def index_matches_nodes(self, within_s: float = 10.0) -> int:
        """Wait until the router knows just the blocks that nodes say they have; how many."""
        until = time.monotonic() + within_s
        while different := await self._index_errors():
            assert time.monotonic() < until, different
            await asyncio.sleep(_POLL_S)
        return self.dispatcher._cluster.index.num_entries

    async def _index_errors(self) -> dict[str, str]:
        held = {m.node_id: await m.node.snapshot() for m in self.dispatcher._roster}
        self.dispatcher._cluster.refresh()
        index = self.dispatcher._cluster.index
        index.check_integrity()
        errors = {}
        for node_id, snapshot in held.items():
            known: dict[BlockHash, Any] = index._holders[node_id].chains._parents
            told = dict(zip(snapshot.hashes, snapshot.parents, strict=True))
            if known != told:
                errors[node_id] = f"{len(known)} blocks are known, and {len(told)} are there"
        for node_id in index._holders.keys() - held.keys():
            errors[node_id] = "is not there"
        return errors | dict.fromkeys(index.needs_snapshot(), "unknown")


async def until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(_POLL_S)
