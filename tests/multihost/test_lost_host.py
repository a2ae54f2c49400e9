"""A host is gone, with all that ran on it; what was there is made anew on another one.

power    nothing is heard of it any more, and nothing ever ended
killed   all of Ray's processes are killed at once, and its kernel says so to everybody
cut      it lives, but the head, the directory and the gateway do not reach it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from cluster.ray_mode.spec import MemberState
from tests.multihost.host_cluster import HostCluster, eventually, host_spec
from tests.multihost.ray_hosts import HEAD, RayHosts

WHOLE_S = 60.0  # of which Ray takes 15 to 20 until it believes in a host's end

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.timeout(300)]

_WAYS: dict[str, Callable[[RayHosts], None]] = {
    "power": lambda hosts: hosts.network.lose("h2"),
    "killed": lambda hosts: hosts.kill_ray("h2"),
    "cut": lambda hosts: hosts.network.cut(HEAD, "h2"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        many = metafunc.config.getoption("--all-faults")
        metafunc.parametrize("way", list(_WAYS) if many else ["power"])


@pytest.fixture
async def cluster(hosts: RayHosts, model_dir: Path) -> AsyncIterator[HostCluster]:
    """With a prefill and a decode node on each of h1 and h2, of which h2 may get lost."""
    up = HostCluster.up(hosts, host_spec(hosts, model_dir))
    cluster = await asyncio.to_thread(up.__enter__)
    try:
        yield cluster
    finally:
        await asyncio.to_thread(up.__exit__, None, None, None)
        await asyncio.to_thread(hosts.start_anew, "h2")


async def test_all_goes_on_elsewhere(
    cluster: HostCluster, hosts: RayHosts, client: httpx.AsyncClient, way: str
) -> None:
    async with cluster.own_gateway() as gateway:
        async with cluster.load(gateway, client) as load:
            await load.busy()
            await asyncio.to_thread(_WAYS[way], hosts)
            await load.more(40)
            await eventually(lambda: _whole_without(cluster, "h2"), "not whole again", WHOLE_S)
            hosts.network.heal_all()
            await load.more(24)
        await gateway.meet(await cluster.members())
        await gateway.at_rest()
        await gateway.index_matches_nodes()


async def _whole_without(cluster: HostCluster, host: str) -> bool:
    members = await cluster.members()
    ready = all(member.state is MemberState.READY for member in members.values())
    return ready and host not in (await cluster.homes()).values()
