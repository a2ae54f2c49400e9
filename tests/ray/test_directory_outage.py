"""The directory's server is away for a while, comes back empty, and no client notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.directory_config import DirectoryConfig
from cluster.ray_mode.local_ray import KnownCluster
from tests.directory.servers import KINDS, Server
from tests.ray.load import Load, through
from tests.ray.ray_world import make_spec, up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    try:
        yield server
    finally:
        server.stop()


async def test_the_cluster_serves_on_without_its_directory(
    head: KnownCluster,
    model_dir: Path,
    server: Server,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Nodes are started, too, and are known as soon as the server is back."""
    away_s = 20 if request.config.getoption("--all-faults") else 4  # longer than a node's TTL
    spec = make_spec(
        head,
        model_dir,
        prefill=2,
        decode=2,
        directory=DirectoryConfig(url=server.url, node_ttl_s=3),
        directory_password=server.password,
    )
    with up(spec, tmp_path) as world:
        async with world.own_gateway() as gateway:
            load = Load([through(gateway.dispatcher)], seed=0)
            async with load:
                await load.busy()
                before = world.members()
                await asyncio.to_thread(server.kill)
                served = load.num_served
                await asyncio.sleep(away_s)  # that is how long it is away
                assert load.num_served > served
                assert not world.report().directory_available
                killed = await asyncio.to_thread(world.kill, "prefill-1")
                await load.more(16)
                await asyncio.to_thread(server.start_empty)
                await world.whole_again(killed, gateway)
                await load.more(16)
            report = world.report()
            assert report.directory_available
            lived = {member.name: member.pid for member in report.members} | {"prefill-1": 0}
            assert lived == {name: m.pid for name, m in before.items()} | {"prefill-1": 0}
            statuses = await gateway.at_rest()
            num_known = await gateway.index_matches_nodes()
            # Blocks of the same content that were computed at the same time are cached twice.
            assert 0 < num_known <= sum(status.blocks.cached for status in statuses.values())
