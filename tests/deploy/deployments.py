"""The files in deploy/, and the commands that start Ray's nodes by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.command_runner import _with_environment_variables
from ray.autoscaler._private.util import prepare_config, with_head_node_ip

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
LAUNCHED = ("on-premises", "aws")
_QUANTITIES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def kvrelay_file(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


def launcher(name: str) -> dict[str, Any]:
    """What a file has for Ray's launcher, made complete by Ray."""
    config: dict[str, Any] = prepare_config(kvrelay_file(name)["ray"]["launcher"])
    return config


def launched_head(name: str) -> str:
    """The shell's command on the head, as Ray's launcher would put it together."""
    config = launcher(name)
    resources = config["available_node_types"][config["head_node_type"]]["resources"]
    return _command(config["head_start_ray_commands"], resources)


def launched_worker(name: str, node_type: str, head: str) -> str:
    """As `launched_head`; `node_type` as in the file, or any if it has none."""
    config = launcher(name)
    resources = config["available_node_types"].get(node_type, {"resources": {}})["resources"]
    return _command(with_head_node_ip(config["worker_start_ray_commands"], head), resources)


def _command(commands: list[str], resources: Mapping[str, int]) -> str:
    variables = {"RAY_OVERRIDE_RESOURCES": dict(resources)} if resources else {}
    return "\n".join(_with_environment_variables(command, variables) for command in commands)


def kubernetes_objects() -> list[dict[str, Any]]:
    text = (DEPLOY / "kuberay.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def kubernetes_object(kind: str, name: str = "kvrelay") -> dict[str, Any]:
    found = [o for o in kubernetes_objects() if o["kind"] == kind and o["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}"
    return found[0]


def ray_cluster_groups() -> dict[str, dict[str, Any]]:
    """The group specs by their names; `head` is the head's."""
    spec = kubernetes_object("RayCluster")["spec"]
    return {"head": spec["headGroupSpec"]} | {g["groupName"]: g for g in spec["workerGroupSpecs"]}


def kuberay_command(group: str, head: str) -> str:
    """What KubeRay's operator runs in a pod of this group, with the head at this address."""
    spec = ray_cluster_groups()[group]
    limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
    params = {
        "block": "true",
        "dashboard-agent-listen-port": "52365",
        "metrics-export-port": "8080",
        "num-cpus": limits["cpu"],
        "memory": str(_number_of_bytes(limits["memory"])),
    }
    params |= {"dashboard-host": "0.0.0.0"} if group == "head" else {"address": f"{head}:6379"}
    params |= spec["rayStartParams"]
    words = ["ulimit -n 65536; ray start"] + ["--head"] * (group == "head")
    return " ".join(words + [_option(name, value) for name, value in sorted(params.items())])


def _option(name: str, value: str) -> str:
    if value == "true":
        return f"--{name}"
    return f"--{name}={value}"


def _number_of_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _QUANTITIES[quantity[-2:]]


def declared(resources: str) -> dict[str, int]:
    """Of `rayStartParams`: JSON in the quotes of a shell."""
    found: dict[str, int] = json.loads(resources[1:-1].replace("\\", ""))
    return found
