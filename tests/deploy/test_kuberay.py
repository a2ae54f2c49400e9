"""deploy/kuberay.yaml: Ray derives what its autoscaler needs, and names are those that there are.

There is no Kubernetes here to apply it to. The names are those of KubeRay's `ray.io/v1`, as of its
releases 1.1 to 1.6, and of Kubernetes' own kinds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import __version__ as ray_version
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from cluster.file import ClusterFile
from cluster.yaml_file import load_yaml
from tests.deploy.deployments import kubernetes_object, kubernetes_objects, ray_cluster_groups

ROLES = ("prefill", "decode")
_CLUSTER = {
    *("headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling"),
    *("autoscalerOptions", "headServiceAnnotations", "suspend", "authOptions"),
}
_HEAD = {"serviceType", "headService", "enableIngress", "rayStartParams", "template"}
_WORKERS = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds"),
    *("rayStartParams", "template", "scaleStrategy"),
}
_POD = {
    *("containers", "initContainers", "volumes", "securityContext", "serviceAccountName"),
    *("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints"),
}
_CONTAINER = {
    *("name", "image", "command", "args", "env", "envFrom", "ports", "resources", "volumeMounts"),
    *("readinessProbe", "livenessProbe", "startupProbe", "securityContext", "imagePullPolicy"),
}
_PROBE = {"tcpSocket", "exec", "httpGet", "periodSeconds", "failureThreshold", "timeoutSeconds"}


@pytest.fixture
def cluster_file(tmp_path: Path) -> ClusterFile:
    """What `kvrelay up` reads in the head's pod."""
    path = tmp_path / "cluster.yaml"
    path.write_text(kubernetes_object("ConfigMap")["data"]["cluster.yaml"])
    return load_yaml(path, ClusterFile)


def test_ray_derives_an_autoscaling_configuration() -> None:
    """Ray validates it against its own schema."""
    config = _derive_autoscaling_config_from_ray_cr(kubernetes_object("RayCluster"))
    types = config["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == 0
    for role in ROLES:
        assert types[role]["resources"][role] == 1


def test_kvrelay_takes_the_file_in_it(cluster_file: ClusterFile) -> None:
    cluster_file.local_config()
    cluster_file.directory.directory_config()
    assert cluster_file.ray.ray_config().address == "auto"


def test_pods_have_room_for_what_is_asked(cluster_file: ClusterFile) -> None:
    config = _derive_autoscaling_config_from_ray_cr(kubernetes_object("RayCluster"))
    resources = {role.value: needs for role, needs in cluster_file.resources().items()}
    for role in ROLES:
        node_type = config["available_node_types"][role]
        assert node_type["min_workers"] >= getattr(cluster_file, role).count
        for name, amount in resources[role].bundle.items():
            assert node_type["resources"][name] >= amount, name


def test_names_are_known() -> None:
    spec = kubernetes_object("RayCluster")["spec"]
    assert spec.keys() <= _CLUSTER
    for name, group in ray_cluster_groups().items():
        assert group.keys() <= (_HEAD if name == "head" else _WORKERS), name
        _check_pod(group["template"]["spec"])
    for deployment in kubernetes_objects():
        if deployment["kind"] == "Deployment":
            _check_pod(deployment["spec"]["template"]["spec"])


def _check_pod(pod: dict[str, Any]) -> None:
    assert pod.keys() <= _POD
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        assert container.keys() <= _CONTAINER
        assert container["readinessProbe"].keys() <= _PROBE
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        ports = [port["containerPort"] for port in container["ports"]]
        assert container["readinessProbe"]["tcpSocket"]["port"] in ports


def test_start_parameters_are_text() -> None:
    for group in ray_cluster_groups().values():
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_every_group_has_its_shared_memory_and_a_token() -> None:
    for name, group in ray_cluster_groups().items():
        pod = group["template"]["spec"]
        container = pod["containers"][0]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        shared = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert shared["medium"] == "Memory", name
        environment = {variable["name"]: variable for variable in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token", name
        assert "secretKeyRef" in environment["RAY_AUTH_TOKEN"]["valueFrom"], name


def test_secrets_come_from_the_secret_that_the_file_tells_of() -> None:
    found = set()
    for o in _all_in(kubernetes_objects()):
        if "secretKeyRef" in o:
            assert o["secretKeyRef"]["name"] == "kvrelay"
            found.add(o["secretKeyRef"]["key"])
        if o.get("name", "").startswith("KVRELAY_"):
            assert "value" not in o
    assert found == {"ray-auth-token", "cluster-token", "api-key", "directory-password"}


def _all_in(value: Any) -> list[dict[str, Any]]:
    """Every mapping in it, itself among them."""
    if isinstance(value, list):
        return [found for item in value for found in _all_in(item)]
    if isinstance(value, dict):
        return [value] + [found for item in value.values() for found in _all_in(item)]
    return []


def test_one_image_and_one_version() -> None:
    groups = ray_cluster_groups().values()
    images = {group["template"]["spec"]["containers"][0]["image"] for group in groups}
    assert len(images) == 1
    assert kubernetes_object("RayCluster")["spec"]["rayVersion"] == ray_version


def test_services_lead_to_ports_that_are_listened_to(cluster_file: ClusterFile) -> None:
    (client_port,) = kubernetes_object("Service", "kvrelay-gateway")["spec"]["ports"]
    head = ray_cluster_groups()["head"]["template"]["spec"]["containers"][0]
    assert client_port["targetPort"] == cluster_file.gateway.port
    assert client_port["targetPort"] in [port["containerPort"] for port in head["ports"]]
    service = kubernetes_object("Service", "kvrelay-directory")
    labels = kubernetes_object("Deployment", "kvrelay-directory")["spec"]["template"]["metadata"]
    assert service["spec"]["selector"].items() <= labels["labels"].items()
    (port,) = service["spec"]["ports"]
    assert cluster_file.directory.url == f"redis://kvrelay-directory:{port['port']}"
