"""What keeps a cluster from starting is said in a line, and nothing of it is left."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.directory_config import DirectoryConfig
from cluster.free_port import free_port
from cluster.ray_mode.local_ray import KnownCluster
from cluster.ray_mode.ray_cluster import RayCluster
from cluster.ray_mode.spec import Spec, namespace
from protocol import KvrelayError, Role
from tests.directory.servers import Server
from tests.e2e.serve_process import run_kvrelay
from tests.ray.ray_head import wait_until
from tests.ray.ray_world import RayWorld, connected_to, make_spec, up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Refusal:
    """Brings up what cannot come up."""

    def __init__(self, head: KnownCluster, state_dir: Path) -> None:
        self._head = head
        self._state_dir = state_dir

    def __call__(self, spec: Spec, *words: str) -> None:
        with pytest.raises(KvrelayError) as caught:
            RayCluster.up(spec, self._state_dir, lambda stage: None)
        message = " ".join(str(caught.value).split())
        for word in words:
            assert word in message
        assert len(message) < 600, "a line that can be read"
        assert "Traceback" not in message
        self.check_nothing_left(spec)

    def check_nothing_left(self, spec: Spec) -> None:
        assert not list(self._state_dir.glob("*.json"))
        with connected_to(self._head, spec.name):
            assert wait_until(lambda: not _left_of(spec)), _left_of(spec)


def _left_of(spec: Spec) -> list[str]:
    """Actors, places on hosts, and what is remembered. This process is a driver."""
    import ray
    from ray.util import list_named_actors

    from cluster.ray_mode.memory import MemoryStore

    actors = list_named_actors(all_namespaces=True)
    groups: dict[str, Any] = ray.util.placement_group_table()
    left = [actor["name"] for actor in actors if actor["namespace"] == namespace(spec.name)]
    left += [
        group["name"]
        for group in groups.values()
        if group["name"].startswith(f"kvrelay-{spec.name}-") and group["state"] != "REMOVED"
    ]
    return left + ["memory"] * (MemoryStore(spec.name).load() is not None)


@pytest.fixture
def refused(head: KnownCluster, tmp_path: Path) -> Refusal:
    return Refusal(head, tmp_path / "state")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.stop()


# ---------------------------------------------------------------------- on a Ray that is there


def test_there_are_too_few_cpus(head: KnownCluster, model_dir: Path, refused: Refusal) -> None:
    spec = make_spec(head, model_dir, prefill=2, num_cpus=3)
    refused(spec, "no host has room for", "needs 3 CPU", "all nodes need 9 CPU", "free")


def test_a_node_dies_at_its_start(head: KnownCluster, model_dir: Path, refused: Refusal) -> None:
    refused(
        make_spec(head, model_dir, compute="dying_compute"),
        "-0: its process was killed, or has crashed",
    )


def test_a_host_has_another_model(head: KnownCluster, model_dir: Path, refused: Refusal) -> None:
    spec = make_spec(head, model_dir, fingerprint="0" * 32)
    refused(spec, "another model under the name", "0" * 32, head.address.rpartition(":")[0])


def test_a_host_has_no_model(head: KnownCluster, tmp_path: Path, refused: Refusal) -> None:
    missing = tmp_path / "nothing"
    spec = make_spec(head, missing, fingerprint="0" * 32)
    refused(spec, f"on {head.address.rpartition(':')[0]}", str(missing), "no such file")


def test_the_port_is_taken(head: KnownCluster, model_dir: Path, refused: Refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(make_spec(head, model_dir, gateways=1, port=port), f"{port} is in use")


def test_nobody_is_where_the_directory_should_be(
    head: KnownCluster, model_dir: Path, refused: Refusal
) -> None:
    port = free_port("127.0.0.1")
    directory = DirectoryConfig(url=f"redis://127.0.0.1:{port}")
    spec = make_spec(head, model_dir, directory=directory)
    refused(spec, "directory.url", f"nothing listens at redis://127.0.0.1:{port}")


def test_the_directory_has_another_password(
    head: KnownCluster, model_dir: Path, server: Server, refused: Refusal
) -> None:
    directory = DirectoryConfig(url=server.url)
    spec = make_spec(head, model_dir, directory=directory, directory_password="wrong one")
    refused(spec, "password")
    refused(make_spec(head, model_dir, directory=directory), "password")


def test_another_cluster_has_the_name_in_the_directory(
    head: KnownCluster, model_dir: Path, server: Server, refused: Refusal
) -> None:
    """It runs on another Ray, as far as anybody can tell."""
    directory = DirectoryConfig(url=server.url, key_prefix="shared")
    spec = make_spec(head, model_dir, directory=directory, directory_password=server.password)
    with server.directory("shared") as theirs:
        theirs.claim("a cluster on another Ray", ttl_s=60)
        refused(spec, "shared", "a cluster on another Ray")
        theirs.release("a cluster on another Ray")


def test_the_name_is_taken(world: RayWorld, model_dir: Path, tmp_path: Path) -> None:
    """The one that is there serves on; another one may have another name beside it."""
    pids = {name: member.pid for name, member in world.members().items()}
    taken = msgspec.structs.replace(world.spec, serve=replace(world.spec.serve, port=0))
    empty = tmp_path / "state"
    for state_dir in (world.state_dir, empty):
        with pytest.raises(KvrelayError, match=f"a cluster '{taken.name}' .*another name"):
            RayCluster.up(taken, state_dir, lambda stage: None)
        world.connect()
    assert not list(empty.glob("*"))
    found = RayCluster.find(taken.name, None, world.state_dir)
    assert {member.name: member.pid for member in found.report().members} == pids
    with up(make_spec(world.cluster.known, model_dir), tmp_path) as second:
        assert second.members().keys() == {"directory", "prefill-0", "decode-0"}
    world.connect()
    assert {name: member.pid for name, member in world.members().items()} == pids


def test_a_node_cannot_start(
    head: KnownCluster, model_dir: Path, tmp_path: Path, refused: Refusal
) -> None:
    """Nothing that is left makes the next start fail, or be another one than was asked for."""
    spec = make_spec(head, model_dir, compute="broken_compute", prefill=2)
    refused(spec, "hash is broken")
    right = replace(spec.config, num_prefill=1)
    spec = msgspec.structs.replace(spec, compute="tests.hash_compute:hash_compute", config=right)
    with up(spec, tmp_path / "second") as world:
        assert world.report().targets == {Role.PREFILL: 1, Role.DECODE: 1}


# ---------------------------------------------------------------------- by command


# It warns of each of its tries to be let in, and cannot be told not to.
_of_ray = re.compile(r"\[[-0-9]+ [:,0-9]+ W .*gcs_client.cc")


def kvrelay_refuses(*arguments: str | Path, state_dir: Path) -> str:
    """A command that fails as it should; its one line."""
    ended = run_kvrelay(*arguments, "--state-dir", state_dir, timeout_s=120)
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not _of_ray.match(line)]
    assert len(lines) == 1, ended.stderr
    (line,) = lines
    assert line.startswith("error: ")
    assert len(line) < 600
    assert not list(state_dir.glob("*.json"))
    return line


@pytest.fixture
def file(tmp_path: Path, model_dir: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"name: wrong\nmodel: {model_dir}\nray: {{address: '127.0.0.2:1'}}\n")
    return path


def test_no_ray_is_at_the_address(file: Path, tmp_path: Path) -> None:
    line = kvrelay_refuses("up", file, state_dir=tmp_path)
    assert "no Ray cluster answers at 127.0.0.2:1" in line


def test_a_ray_with_a_token_that_we_do_not_have(
    head: KnownCluster, file: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE")
        patch.delenv("RAY_AUTH_TOKEN_PATH")
        patch.setenv("RAY_NUM_REDIS_GET_RETRIES", "2")  # so often does Ray try, a second each
        address = f"ray.address={head.address}"
        line = kvrelay_refuses("up", file, "--set", address, state_dir=tmp_path)
    assert "token" in line
    assert head.address in line


def test_a_model_that_is_not_there(file: Path, tmp_path: Path) -> None:
    line = kvrelay_refuses("up", file, "--set", "model=./nothing", state_dir=tmp_path)
    assert "./nothing: there is no such file" in line


def test_a_taken_port_is_found_before_ray_is_started(file: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = kvrelay_refuses("up", file, "--set", f"gateway.port={port}", state_dir=tmp_path)
    assert f"{port} is in use" in line


@pytest.mark.parametrize("command", [["down"], ["scale", "prefill=2"]])
def test_a_cluster_that_is_not_there(command: list[str], tmp_path: Path) -> None:
    line = kvrelay_refuses(*command, "--name", "nobody", state_dir=tmp_path)
    assert "no cluster 'nobody'" in line
