"""What differs between hosts, or cannot work with several, is told before anything starts."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from cluster.ray_mode.spec import Spec
from tests.multihost.host_cluster import HostCluster, host_spec
from tests.multihost.ray_hosts import RayHosts, Refused
from tests.ray.hash_model_dir import hash_model_dir

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.timeout(300)]


def test_nodes_that_other_hosts_cannot_reach(hosts: RayHosts, model_dir: Path) -> None:
    spec = host_spec(hosts, model_dir, transfer={"bind": "127.0.0.1"})
    with pytest.raises(Refused, match=r"transfer\.bind.*127\.0\.0\.1.*3 hosts"):
        _try(hosts, spec)


def test_another_model_on_a_host(hosts: RayHosts, model_dir: Path, tmp_path: Path) -> None:
    other = hash_model_dir(tmp_path / "other", seed=1)
    with hosts.network.hosts["h2"].instead(model_dir, other), pytest.raises(Refused) as refused:
        _try(hosts, host_spec(hosts, model_dir))
    assert f"{hosts.network.address('h2')} has another model" in str(refused.value)


def test_no_model_on_a_host(hosts: RayHosts, model_dir: Path, tmp_path: Path) -> None:
    with hosts.network.hosts["h1"].instead(model_dir, tmp_path), pytest.raises(Refused) as refused:
        _try(hosts, host_spec(hosts, model_dir))
    assert f"on {hosts.network.address('h1')}: " in str(refused.value)


def test_another_version_on_a_host(hosts: RayHosts, model_dir: Path, tmp_path: Path) -> None:
    files = importlib.metadata.files("kvrelay")
    assert files is not None
    metadata = Path(str(next(file for file in files if file.name == "METADATA").locate()))
    version = importlib.metadata.version("kvrelay")
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace(f"Version: {version}", "Version: 0.0.1", 1))
    with hosts.network.hosts["h2"].instead(metadata, other), pytest.raises(Refused) as refused:
        _try(hosts, host_spec(hosts, model_dir))
    told = f"{hosts.network.address('h2')} has kvrelay 0.0.1, here it is {version}"
    assert told in str(refused.value)


def _try(hosts: RayHosts, spec: Spec) -> None:
    with HostCluster.up(hosts, spec):
        pass
