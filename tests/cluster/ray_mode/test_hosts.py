"""Plans of which host takes which node."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ray_config import Placement
from cluster.ray_mode.hosts import Host, HostPlanner, NoPlace, Placed, Wanted
from protocol import Role

P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED


def host(number: int, cpus: float = 4, gpus: float = 0, free: float | None = None) -> Host:
    total = {"CPU": cpus, "GPU": gpus}
    left = total | {"CPU": cpus if free is None else free}
    return Host(f"h{number}", f"10.0.0.{number}", total, left)


def nodes(*roles: Role, cpus: float = 1, gpus: float = 0) -> list[Wanted]:
    needs = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    return [Wanted(f"{role}-{n}", role, needs) for n, role in enumerate(roles)]


def homes(planner: HostPlanner, hosts: list[Host], *args: object) -> list[str]:
    return [home.host_id for home in planner.plan(hosts, *args).values()]  # type: ignore[arg-type]


class TestRules:
    def test_pack_takes_few_hosts(self) -> None:
        planner = HostPlanner(Placement.PACK)
        assert homes(planner, [host(1), host(2)], nodes(P, P, D, D)) == ["h1"] * 4
        assert homes(planner, [host(1), host(2)], nodes(P, P, D, D, D)) == ["h1"] * 4 + ["h2"]

    def test_spread_takes_many_for_each_role(self) -> None:
        planner = HostPlanner(Placement.SPREAD)
        assert homes(planner, [host(1), host(2)], nodes(P, P, D, D)) == ["h1", "h2", "h1", "h2"]

    def test_spread_looks_at_those_that_are_there(self) -> None:
        planner = HostPlanner(Placement.SPREAD)
        there = [Placed(P, "h1"), Placed(D, "h2")]
        assert homes(planner, [host(1), host(2)], nodes(P), there) == ["h2"]

    def test_strict_pack_takes_the_host_that_has_room_for_all(self) -> None:
        planner = HostPlanner(Placement.STRICT_PACK)
        assert homes(planner, [host(1, cpus=3), host(2)], nodes(P, P, D, D)) == ["h2"] * 4
        with pytest.raises(NoPlace, match="strict_pack: no host has room for all 4 nodes"):
            planner.plan([host(1, cpus=3), host(2, cpus=3)], nodes(P, P, D, D))

    def test_strict_pack_stays_where_the_others_are(self) -> None:
        planner = HostPlanner(Placement.STRICT_PACK)
        assert homes(planner, [host(1), host(2)], nodes(P), [Placed(D, "h2")]) == ["h2"]
        with pytest.raises(NoPlace):
            planner.plan([host(1), host(2, free=0)], nodes(P), [Placed(D, "h2")])

    def test_strict_spread_shares_no_host(self) -> None:
        planner = HostPlanner(Placement.STRICT_SPREAD)
        hosts = [host(1), host(2)]
        assert homes(planner, hosts, nodes(P, D)) == ["h1", "h2"]
        with pytest.raises(NoPlace, match="strict_spread: 2 hosts for 3 or more nodes"):
            planner.plan(hosts, nodes(P, D, D))

    def test_separate_roles_share_no_host(self) -> None:
        planner = HostPlanner(Placement.PACK, separate_roles=True)
        hosts = [host(1), host(2)]
        assert homes(planner, hosts, nodes(P, P, D, D, U)) == ["h1", "h1", "h2", "h2", "h1"]
        with pytest.raises(NoPlace, match="separate_roles: none of these hosts has only its kind"):
            planner.plan([host(1)], nodes(P, D))

    def test_custom_resources_decide(self) -> None:
        gpu = host(2, gpus=1)
        planner = HostPlanner(Placement.PACK)
        assert homes(planner, [host(1), gpu], nodes(P, gpus=1)) == ["h2"]


class TestWhatIsMissing:
    def test_it_says_for_whom_and_what(self) -> None:
        with pytest.raises(NoPlace) as raised:
            HostPlanner(Placement.PACK).plan([host(1, cpus=2, free=1)], nodes(P, D, cpus=1))
        assert str(raised.value) == (
            "no host has room for decode-1, which needs 1 CPU; all nodes need 2 CPU; "
            "10.0.0.1 has 1 of 2 CPU free"
        )

    def test_a_resource_that_nobody_has(self) -> None:
        with pytest.raises(NoPlace, match=r"needs 1 CPU and 2 GPU; .* 0 of 0 GPU free"):
            HostPlanner(Placement.PACK).plan([host(1)], nodes(P, gpus=2))

    def test_no_host_at_all(self) -> None:
        with pytest.raises(NoPlace, match="there is no host"):
            HostPlanner(Placement.PACK).plan([], nodes(P))


_placements = st.sampled_from([p for p in Placement if p is not Placement.STRICT_PACK])


@given(
    placement=_placements,
    separate=st.booleans(),
    cpus=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    roles=st.lists(st.sampled_from([P, D]), min_size=1, max_size=5),
)
def test_a_plan_keeps_every_rule(
    placement: Placement, separate: bool, cpus: list[int], roles: list[Role]
) -> None:
    hosts = [host(number, cpus=count) for number, count in enumerate(cpus)]
    wanted = nodes(*roles)
    try:
        plan = HostPlanner(placement, separate).plan(hosts, wanted)
    except NoPlace:
        # A greedy plan may miss one that a search finds, but not where nothing is in the way.
        assert separate or placement is not Placement.PACK or sum(cpus) < len(roles)
        return
    load = Counter(home.host_id for home in plan.values())
    assert set(plan) == {node.node_id for node in wanted}
    assert all(load[its.host_id] <= its.total["CPU"] for its in hosts)
    if placement is Placement.STRICT_SPREAD:
        assert max(load.values()) == 1
    if separate:
        for one, other in product(wanted, wanted):
            if plan[one.node_id] == plan[other.node_id]:
                assert one.role is other.role
