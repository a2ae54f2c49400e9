"""What the other tests here stand on: paths that can be cut, and hosts of which nothing is left."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.peering import ProcessIdentity
from tests.multihost.host_network import HERE, HostNetwork

pytestmark = pytest.mark.multihost

_PORT = 7000
_ECHO = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        end, _ = server.accept()
        while data := end.recv(100):
            end.sendall(data)
"""
_IDENTITY = """
from kv_transfer.peering import ProcessIdentity
print(ProcessIdentity.own().host_id)
"""


@pytest.fixture
def network(needs_hosts: None, tmp_path: Path) -> Iterator[HostNetwork]:
    with HostNetwork(("h0", "h1"), tmp_path) as network:
        yield network


def _asks(connection: socket.socket, text: bytes) -> bytes | None:
    """The echo; None: nothing comes."""
    connection.sendall(text)
    try:
        return connection.recv(100)
    except TimeoutError:
        return None


def test_a_cut_is_silent_and_heals(network: HostNetwork, tmp_path: Path) -> None:
    python = [sys.executable, "-c", _ECHO]
    with network.hosts["h0"].popen(python, tmp_path / "log", {}, stdout=subprocess.PIPE) as echo:
        assert echo.stdout is not None
        assert echo.stdout.readline() == b"ready\n"
        address = (network.address("h0"), _PORT)
        with socket.create_connection(address, timeout=10) as connection:
            assert _asks(connection, b"one") == b"one"
            connection.settimeout(0.5)
            with network.without(HERE, "h0"):
                assert _asks(connection, b"two") is None
            connection.settimeout(10)
            assert connection.recv(100) == b"two"
        network.hosts["h0"].end()


def test_other_paths_stay(network: HostNetwork) -> None:
    dial = (
        "import socket, sys; "
        "socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10).close()"
    )
    with socket.create_server((network.address(HERE), 0)) as server:
        port = str(server.getsockname()[1])
        words = (sys.executable, "-c", dial, network.address(HERE), port)
        with network.without("h0", "h1"):
            network.hosts["h0"].run(*words)
            network.hosts["h1"].run(*words)


def test_hosts_are_hosts_to_the_product(network: HostNetwork) -> None:
    own = ProcessIdentity.own().host_id
    words = (sys.executable, "-c", _IDENTITY)
    theirs = {network.hosts[name].run(*words).strip() for name in ("h0", "h1")}
    assert len(theirs | {own}) == 3
    assert all(theirs)


def test_nothing_is_left_of_a_failed_test(needs_hosts: None, tmp_path: Path) -> None:
    devices = _devices()
    with contextlib.suppress(RuntimeError), HostNetwork(("h0",), tmp_path) as network:
        host = network.hosts["h0"]
        host.popen(["sleep", "1000"], tmp_path / "log", {}).returncode = 0  # nobody waits for it
        namespace = os.stat(f"/proc/{host.pid}/ns/net").st_ino
        assert _processes_in(namespace)
        assert _devices() != devices
        raise RuntimeError
    assert _devices() == devices
    assert not _processes_in(namespace)


def _devices() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def _processes_in(namespace: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if (entry / "ns" / "net").stat().st_ino == namespace:
                    found.append(int(entry.name))
    return found
