"""Which host takes which node: a plan, made before anything is placed.

pack            as many as fit beside those that are there    spread   where the fewest are
strict_pack     all on one host                               strict_spread   none shares one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.ray_config import Placement
from protocol import KvrelayError, Role

_EPSILON = 1e-4  # Ray counts in units of that


class NoPlace(KvrelayError):
    """The hosts have not what the nodes need."""

    label = "no_place"


@dataclass(frozen=True)
class Host:
    """A host of the Ray cluster, which calls it a node."""

    host_id: str  # Ray's id of the node
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def fits(self, needs: Mapping[str, float]) -> bool:
        return all(self.free.get(name, 0) + _EPSILON >= amount for name, amount in needs.items())

    def without(self, needs: Mapping[str, float]) -> Host:
        left = {name: self.free.get(name, 0) - amount for name, amount in needs.items()}
        return replace(self, free={**self.free, **left})


@dataclass(frozen=True)
class Wanted:
    """A node that has no place yet."""

    node_id: str
    role: Role
    needs: Mapping[str, float]


@dataclass(frozen=True)
class Placed:
    """A node that has one."""

    role: Role
    host_id: str


@dataclass(frozen=True)
class HostPlanner:
    """Knows the rules of a deployment; plans for any hosts."""

    placement: Placement
    separate_roles: bool = False

    def plan(
        self, hosts: Sequence[Host], wanted: Sequence[Wanted], placed: Sequence[Placed] = ()
    ) -> dict[str, Host]:
        """The host of each wanted node, by node id.

        Raises:
            NoPlace: says for whom, and what is missing.
        """
        if self.placement is Placement.STRICT_PACK:
            return self._plan_on_one(hosts, wanted, placed)
        left = {host.host_id: host for host in hosts}
        taken, found = list(placed), {}
        for node in wanted:
            able = [host for host in left.values() if self._may(node, host, taken)]
            if not able:
                raise NoPlace(self._missing(node, hosts, wanted, taken))
            chosen = min(able, key=lambda host: self._score(node, host, taken))
            left[chosen.host_id] = chosen.without(node.needs)
            taken.append(Placed(node.role, chosen.host_id))
            found[node.node_id] = chosen
        return found

    def _plan_on_one(
        self, hosts: Sequence[Host], wanted: Sequence[Wanted], placed: Sequence[Placed]
    ) -> dict[str, Host]:
        together = replace(self, placement=Placement.PACK)
        homes = {node.host_id for node in placed}
        for host in hosts:
            if homes <= {host.host_id}:
                try:
                    return together.plan([host], wanted, placed)
                except NoPlace:
                    continue
        raise NoPlace(
            f"strict_pack: no host has room for all {len(wanted)} nodes; {_describe_sum(wanted)} "
            f"are needed on one; {_describe_hosts(hosts, wanted)}"
        )

    def _may(self, node: Wanted, host: Host, taken: Sequence[Placed]) -> bool:
        there = [other for other in taken if other.host_id == host.host_id]
        if there and self.placement is Placement.STRICT_SPREAD:
            return False
        return host.fits(node.needs) and not self._in_the_way(node, there)

    def _in_the_way(self, node: Wanted, there: Sequence[Placed]) -> bool:
        kinds = {other.role for other in there} | {node.role}
        return self.separate_roles and {Role.PREFILL, Role.DECODE} <= kinds

    def _score(self, node: Wanted, host: Host, taken: Sequence[Placed]) -> tuple[int, int]:
        """The least is chosen, and of equals the first."""
        there = [other for other in taken if other.host_id == host.host_id]
        same = sum(other.role is node.role for other in there)
        if self.placement is Placement.PACK:
            return -len(there), -same
        return same, len(there)

    def _missing(
        self,
        node: Wanted,
        hosts: Sequence[Host],
        wanted: Sequence[Wanted],
        taken: Sequence[Placed],
    ) -> str:
        free = [host for host in hosts if host.fits(node.needs)]
        rules = []
        if free and self.placement is Placement.STRICT_SPREAD:
            rules.append(f"strict_spread: {len(hosts)} hosts for {len(taken) + 1} or more nodes")
        if free and self.separate_roles:
            rules.append("separate_roles: none of these hosts has only its kind of node")
        return (
            f"no host has room for {node.node_id}, which needs {_describe(node.needs)}; "
            + "".join(f"{rule}; " for rule in rules)
            + f"all nodes need {_describe_sum(wanted)}; {_describe_hosts(hosts, wanted)}"
        )


def _describe_hosts(hosts: Sequence[Host], wanted: Sequence[Wanted]) -> str:
    names = sorted({name for node in wanted for name in node.needs})
    if not hosts:
        return "there is no host"
    return ", ".join(
        f"{host.address} has "
        + (
            " and ".join(
                f"{host.free.get(name, 0):g} of {host.total.get(name, 0):g} {name} free"
                for name in names
            )
            or "no room"
        )
        for host in hosts
    )


def _describe_sum(wanted: Sequence[Wanted]) -> str:
    total: dict[str, float] = {}
    for node in wanted:
        for name, amount in node.needs.items():
            total[name] = total.get(name, 0) + amount
    return _describe(total)


def _describe(needs: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(needs.items())) or "nothing"
