"""The processes of a cluster, each under a `Member`: how they are made, and found again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ray_mode.directory_actor import DirectoryActor
from cluster.ray_mode.gateway_actor import GatewayActor
from cluster.ray_mode.member import Actor, Member
from cluster.ray_mode.memory import Memory
from cluster.ray_mode.node_actor import NodeActor
from cluster.ray_mode.places import Places, living_hosts, on_host
from cluster.ray_mode.spec import (
    DIRECTORY,
    DirectoryPlan,
    GatewayPlan,
    MemberState,
    NodePlan,
    Spec,
    namespace,
    pack,
)
from protocol import ConfigError

DRAIN_S = 30.0  # for requests of a node that stops, unless told otherwise


class Crew:
    """Belongs to the controller, whose `memory` says what there is to be."""

    def __init__(self, spec: Spec, memory: Callable[[], Memory]) -> None:
        self.members: dict[str, Member] = {}
        self.has_started = False  # all of it, once
        self._spec = spec
        self._memory = memory
        self._namespace = namespace(spec.name)
        self._places = Places(spec.name, spec.ray, spec.resources)
        self._here = str(ray.get_runtime_context().get_node_id())

    def member(self, name: str) -> Member:
        """Raises ConfigError: there is none of that name."""
        if name not in self.members:
            raise ConfigError("node", f"{name} is none of {', '.join(sorted(self.members))}")
        return self.members[name]

    async def leave(self, names: Iterable[str], drain_s: float) -> None:
        """Drain and stop these; returns when their processes are gone and their places free."""
        leaving = [name for name in names if name in self.members]
        await asyncio.gather(*(self.members[name].leave(drain_s) for name in leaving))
        for name in leaving:
            await self._places.release(name)
            del self.members[name]

    # ------------------------------------------------------------------ the three kinds

    def add_directory(self, host: str) -> Member:
        memory = self._memory()
        plan = DirectoryPlan(
            address=memory.directory,
            host=host,
            port=memory.directory_port,
            log_level=self._spec.log_level,
        )

        async def make() -> Actor:
            where = NodeAffinitySchedulingStrategy(self._home_of(host), soft=False)
            return self._make_actor(
                DirectoryActor, DIRECTORY, pack(plan), num_cpus=0, scheduling_strategy=where
            )

        return self._add(DIRECTORY, "directory", make)

    def _home_of(self, address: str) -> str:
        """The host that has the address; this one, if it is a loopback address."""
        homes = {host.address: host.host_id for host in living_hosts()}
        return homes.get(address, self._here)

    def add_node(self, node_id: str) -> Member:
        async def make() -> Actor:
            memory = self._memory()
            role = memory.nodes[node_id]
            place = await self._places.place(node_id, memory.nodes)
            plan = NodePlan(
                spec=self._spec,
                role=role,
                node_id=node_id,
                directory=memory.directory,
                nodes_on_host=place.nodes_on_host,
            )
            resources = self._spec.resources[role]
            return self._make_actor(
                NodeActor,
                node_id,
                pack(plan),
                place.host_address,
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                resources=dict(resources.resources),
                memory=resources.memory_bytes,
                scheduling_strategy=place.strategy,
            )

        role = self._memory().nodes[node_id]
        restarts = self._spec.resources[role].max_restarts
        return self._add(node_id, role.value, make, restarts, drain_s=DRAIN_S)

    def add_gateway(self, name: str, *, is_first: bool) -> Member:
        """The first one is on the host of the controller; others are spread."""

        async def make() -> Actor:
            plan = GatewayPlan(
                spec=self._spec,
                gateway_id=name,
                directory=self._memory().directory,
                expected=self._expected(),
            )
            where = on_host(self._here) if is_first else {"scheduling_strategy": "SPREAD"}
            return self._make_actor(
                GatewayActor, name, pack(plan), num_cpus=self._spec.gateways.num_cpus, **where
            )

        return self._add(name, "gateway", make, drain_s=DRAIN_S)

    def _expected(self) -> tuple[str, ...]:
        """The nodes that a gateway meets before it answers: all, or those that are not away."""
        nodes = self._memory().nodes
        if not self.has_started:
            return tuple(nodes)
        return tuple(n for n in nodes if self.members[n].state is MemberState.READY)

    # ------------------------------------------------------------------ what they have in common

    def _add(
        self,
        name: str,
        kind: str,
        make: Callable[[], Awaitable[Actor]],
        max_restarts: int | None = None,
        drain_s: float | None = None,
    ) -> Member:
        member = Member(
            name,
            kind,
            self._spec.ray,
            find=lambda: self._find(name),
            make=make,
            max_restarts=max_restarts,
            drain_s=drain_s,
        )
        self.members[name] = member
        return member

    def _find(self, name: str) -> Actor | None:
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, namespace=self._namespace)
        return None

    def _make_actor(self, kind: type, name: str, *args: object, **options: Any) -> Actor:
        """It outlives this process. Restarts are not Ray's: each takes a new plan."""
        return (
            ray.remote(kind)
            .options(
                name=name,
                namespace=self._namespace,
                lifetime="detached",
                max_restarts=0,
                max_task_retries=0,
                **options,
            )
            .remote(*args)
        )
