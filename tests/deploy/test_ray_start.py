"""The commands in deploy/ that start Ray: what they say on each host, and that Ray takes it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.deploy.deployments import (
    LAUNCHED,
    declared,
    kuberay_command,
    kvrelay_file,
    launched_head,
    launched_worker,
    launcher,
    ray_cluster_groups,
)
from tests.deploy.ray_hosts import RayHosts

HEAD = "127.0.0.31"
WORKER = "127.0.0.32"
ROLES = ("prefill", "decode")
RAY_PORTS = {
    "--node-manager-port": "6380",
    "--object-manager-port": "6381",
    "--runtime-env-agent-port": "6382",
    "--min-worker-port": "10002",
    "--max-worker-port": "10999",
}


@pytest.fixture
def hosts() -> Iterator[RayHosts]:
    with RayHosts() as hosts:
        yield hosts


@dataclass(frozen=True)
class Way:
    """A way to start hosts, and where it says the rest."""

    name: str

    @property
    def variables(self) -> dict[str, str]:
        """Of a pod; what the launcher starts, sets them itself."""
        if self.name != "kuberay":
            return {}
        environment = ray_cluster_groups()["head"]["template"]["spec"]["containers"][0]["env"]
        return {v["name"]: v["value"] for v in environment if v["name"] == "RAY_AUTH_MODE"}

    def head(self) -> str:
        return kuberay_command("head", HEAD) if self.name == "kuberay" else launched_head(self.name)

    def worker(self, role: str) -> str:
        if self.name == "kuberay":
            return kuberay_command(role, HEAD)
        return launched_worker(self.name, role, HEAD)

    def address(self, role: str) -> str:
        """That of a host for this role, where that matters."""
        if self.name != "on-premises":
            return ""
        addresses = launcher(self.name)["provider"]["worker_ips"]
        return str(addresses[0] if role == "prefill" else addresses[-1])


WAYS = [Way(name) for name in (*LAUNCHED, "kuberay")]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


@each_way
def test_ports_are_the_same_everywhere(way: Way, hosts: RayHosts) -> None:
    head = _options(hosts.words(way.head()))
    assert head.items() >= RAY_PORTS.items()
    assert head["--port"] == "6379"
    for role in ROLES:
        worker = _options(hosts.words(way.worker(role), way.address(role)))
        assert worker.items() >= RAY_PORTS.items()
        assert worker["--address"] == f"{HEAD}:6379"


def test_each_machine_on_the_premises_knows_its_role(hosts: RayHosts) -> None:
    command = launched_worker("on-premises", "", HEAD)
    addresses = launcher("on-premises")["provider"]["worker_ips"]
    roles = {
        address: _options(hosts.words(command, address))["--resources"] for address in addresses
    }
    for role in ROLES:
        wanted = kvrelay_file("on-premises")[role]["count"]
        assert list(roles.values()).count(f'{{"{role}":1}}') == wanted
    assert len(roles) == sum(kvrelay_file("on-premises")[role]["count"] for role in ROLES)


@pytest.mark.slow
@pytest.mark.multihost
def test_a_head_and_a_worker_make_a_cluster() -> None:
    """In all ways at once, because Ray mostly waits while it starts."""
    with contextlib.ExitStack() as ends:
        clusters = {way: ends.enter_context(RayHosts()) for way in WAYS}
        for way, hosts in clusters.items():
            hosts.start_head(way.head(), way.variables)
        for way, hosts in clusters.items():
            worker, address = way.worker("prefill"), way.address("prefill")
            hosts.start_worker("worker", worker, way.variables, address)
        for hosts in clusters.values():
            _check_cluster(hosts)
    assert not [process for hosts in clusters.values() for process in hosts.processes.look()]


def _check_cluster(hosts: RayHosts) -> None:
    for name in ("head", "worker"):
        hosts.wait_until_started(name, deadline_s=120)
    nodes = hosts.living_nodes({"RAY_AUTH_MODE": "token"})
    assert nodes.keys() == {HEAD, WORKER}
    assert nodes[WORKER]["prefill"] == 1
    assert "prefill" not in nodes[HEAD]
    assert not nodes[HEAD].get("CPU")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        hosts.living_nodes({"RAY_AUTH_MODE": "disabled"})
    assert b"AuthenticationError" in refused.value.stderr


def test_pods_declare_what_nodes_ask_for() -> None:
    groups = ray_cluster_groups()
    for role in ROLES:
        assert declared(groups[role]["rayStartParams"]["resources"]) == {role: 1}


def _options(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}
