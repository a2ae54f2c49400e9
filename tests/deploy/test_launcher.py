"""deploy/*.yaml for `kvrelay up`: kvrelay takes them, and so does Ray's cluster launcher."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ray import __version__ as ray_version
from ray.autoscaler._private.util import validate_config

from cluster.file import ClusterFile
from cluster.yaml_file import load_yaml
from tests.deploy.deployments import DEPLOY, LAUNCHED, ROOT, kvrelay_file, launcher

each_file = pytest.mark.parametrize("name", LAUNCHED)


@each_file
def test_kvrelay_takes_it(name: str) -> None:
    settings = load_yaml(DEPLOY / f"{name}.yaml", ClusterFile)
    settings.local_config()
    settings.serve_config(Path("/nowhere"))
    settings.resources()
    settings.directory.directory_config()
    assert settings.ray.ray_config().launcher == kvrelay_file(name)["ray"]["launcher"]


@each_file
def test_ray_takes_it(name: str) -> None:
    validate_config(launcher(name))


@each_file
def test_ray_would_say_what_is_wrong(name: str) -> None:
    config = launcher(name) | {"workers": 3}
    with pytest.raises(jsonschema.ValidationError, match="workers"):
        validate_config(config)


@each_file
def test_hosts_have_room_for_what_is_asked(name: str) -> None:
    asked, hosts = kvrelay_file(name), _worker_hosts(name)
    for role in ("prefill", "decode"):
        with_role = sum(role in resources for resources in hosts)
        assert with_role >= asked[role]["count"]
        assert asked[role]["resources"] == {role: 1}


@each_file
def test_the_same_name_everywhere(name: str) -> None:
    assert kvrelay_file(name)["name"] == launcher(name)["cluster_name"]


@each_file
def test_versions_are_those_of_the_project(name: str) -> None:
    commands = " ".join(launcher(name)["setup_commands"])
    assert _torch() in commands.split()
    assert f"ray=={ray_version}" in commands.split()


@each_file
def test_the_model_is_fetched_that_is_served(name: str) -> None:
    fetch = [c for c in launcher(name)["setup_commands"] if "models fetch" in c]
    assert [command.split()[-1] for command in fetch] == [kvrelay_file(name)["model"]]


def test_the_port_for_clients_is_open_on_aws() -> None:
    rules = launcher("aws")["provider"]["security_group"]["IpPermissions"]
    port = kvrelay_file("aws")["gateway"]["port"]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in rules] == [(port, port)]
    assert all(r["CidrIp"] != "0.0.0.0/0" for rule in rules for r in rule["IpRanges"])


def test_machines_on_the_premises_are_in_the_network_of_the_transfer() -> None:
    import ipaddress

    file = kvrelay_file("on-premises")
    network = ipaddress.ip_network(file["transfer"]["bind"])
    provider = file["ray"]["launcher"]["provider"]
    addresses = [provider["head_ip"], *provider["worker_ips"]]
    assert all(ipaddress.ip_address(address) in network for address in addresses)
    assert len(set(addresses)) == len(addresses)


@each_file
def test_no_secret_is_in_it(name: str) -> None:
    text = (DEPLOY / f"{name}.yaml").read_text(encoding="utf-8")
    assert not re.search(r"(?i)(password|secret|api_key|token)\s*[:=]\s*[\"']?[0-9a-z]{8}", text)
    assert "export RAY_AUTH_MODE=token" in text


def _worker_hosts(name: str) -> list[dict[str, Any]]:
    """The custom resources of each host that is there from the beginning."""
    config = copy.deepcopy(launcher(name))
    if config["provider"]["type"] == "local":
        chosen = "\n".join(config["worker_start_ray_commands"])
        prefill = set(re.findall(r'" ([\d.]+) "', chosen))
        return [
            {"prefill": 1} if address in prefill else {"decode": 1}
            for address in config["provider"]["worker_ips"]
        ]
    return [
        node_type["resources"]
        for name, node_type in config["available_node_types"].items()
        if name != config["head_node_type"]
        for _ in range(node_type["min_workers"])
    ]


def _torch() -> str:
    found = re.search(r'"(torch==[^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]
