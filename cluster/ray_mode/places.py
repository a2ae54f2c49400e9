"""Places on the hosts of a Ray cluster: one placement group a node, kept while the node restarts.

A group holds what its node needs, also while nobody is there, so nobody else takes it. Where it is
to be says a `HostPlanner`; groups of several bundles would leave nothing to shrink or to move.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.eventually import eventually
from cluster.ray_config import NodeResources, RayConfig
from cluster.ray_mode.hosts import Host, HostPlanner, NoPlace, Placed, Wanted
from protocol import Role

_HOST_LABEL = "ray.io/node-id"
_LEAST = {"CPU": 0.001}  # a group of nothing is none


@dataclass(frozen=True)
class Place:
    """Where a node is to be started."""

    strategy: PlacementGroupSchedulingStrategy
    host_address: str
    nodes_on_host: int  # of ours, this one included


class Places:
    """The groups of one cluster, planned by its rules."""

    def __init__(
        self,
        name: str,
        config: RayConfig,
        resources: Mapping[Role, NodeResources],
    ) -> None:
        """`name` tells the groups from those of other clusters."""
        self._name = name
        self._timeout_s = config.placement_timeout_s
        self._grows = config.launcher is not None  # more hosts may come if they are needed
        self._planner = HostPlanner(config.placement, config.separate_roles)
        self._resources = resources
        self._planning = asyncio.Lock()  # a plan sees what the one before it has taken

    async def place(self, node_id: str, nodes: Mapping[str, Role]) -> Place:
        """The place of a node, which may have had it before. `nodes`: all that there are to be.

        Raises:
            NoPlace: there is none.
        """
        async with self._planning:
            hosts = {host.host_id: host for host in living_hosts()}
            if self._home(node_id) not in hosts:  # none yet, or on a host that is gone
                await self._place_all(nodes, hosts)
                hosts = {host.host_id: host for host in living_hosts()}
            home, group = self._home(node_id), self._find(node_id)
            if group is None or home not in hosts:
                raise NoPlace(f"{node_id} has lost its place")
            homes = [self._home(name) for name in nodes]
            return Place(_strategy(group), hosts[home].address, homes.count(home))

    async def _place_all(self, nodes: Mapping[str, Role], hosts: Mapping[str, Host]) -> None:
        """Plan for all that have none, so that the rules hold for them together."""
        homes = {name: self._home(name) for name in nodes}
        placed = [Placed(nodes[name], home) for name, home in homes.items() if home in hosts]
        wanted = [
            Wanted(name, nodes[name], self._resources[nodes[name]].bundle)
            for name, home in homes.items()
            if home not in hosts
        ]
        plan: Mapping[str, Host] = {}
        try:
            plan = self._planner.plan(list(hosts.values()), wanted, placed)
        except NoPlace:
            if not self._grows:
                raise
        for node in wanted:
            await self._reserve(node, plan.get(node.node_id))

    async def _reserve(self, node: Wanted, host: Host | None) -> None:
        """`host` None: wherever, which has Ray's autoscaler add one.

        Raises:
            NoPlace: there was none in time.
        """
        await self.release(node.node_id)
        group = placement_group(
            [dict(node.needs) or dict(_LEAST)],
            strategy="PACK",
            name=self._group_name(node.node_id),
            lifetime="detached",
            bundle_label_selector=None if host is None else [{_HOST_LABEL: host.host_id}],
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await group.ready()
        except TimeoutError as error:
            await self.release(node.node_id)
            where = "" if host is None else f" on {host.address}"
            raise NoPlace(
                f"{node.node_id} has got no place{where} within {self._timeout_s:g} s (ray."
                f"placement_timeout_s); it needs {dict(node.needs)}"
            ) from error

    def _home(self, node_id: str) -> str:
        """Ray's id of the host where the node's place is; empty: it has none."""
        group = self._find(node_id)
        if group is None:
            return ""
        table: dict[str, Any] = ray.util.placement_group_table(group)
        return next(iter(table.get("bundles_to_node_id", {}).values()), "")

    async def release(self, node_id: str) -> None:
        """Harmless if there is none."""
        group = self._find(node_id)
        if group is None:
            return
        remove_placement_group(group)
        await eventually(lambda: self._find(node_id) is None, within_s=self._timeout_s)

    def _find(self, node_id: str) -> PlacementGroup | None:
        with contextlib.suppress(ValueError):
            group = get_placement_group(self._group_name(node_id))
            state = ray.util.placement_group_table(group).get("state")
            return None if state == "REMOVED" else group
        return None

    def _group_name(self, node_id: str) -> str:
        return f"kvrelay-{self._name}-{node_id}"


def on_host(host_id: str) -> dict[str, Any]:
    """Options of an actor that is to be on this host, or on any other if it is gone.

    Ray's soft affinity is for what needs resources; whatever needs none it starts anywhere.
    """
    return {
        "label_selector": {_HOST_LABEL: host_id},
        "fallback_strategy": [{"label_selector": {}}],
    }


def _strategy(group: PlacementGroup) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)


def living_hosts() -> list[Host]:
    """By address. What is free is as of the last report of each host, a moment ago."""
    # Public interfaces tell the sum of what is free, and not where.
    from ray._private.state import available_resources_per_node

    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    hosts = [
        Host(
            host_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=_plain(node["Resources"]),
            free=_plain(free.get(node["NodeID"], node["Resources"])),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(hosts, key=lambda host: (host.address, host.host_id))


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Without what Ray counts for itself: a name for each node and each group."""
    return {
        name: float(amount)
        for name, amount in resources.items()
        if not name.startswith("node:") and "_group_" not in name
    }
