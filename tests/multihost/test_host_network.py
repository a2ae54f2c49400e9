"""What the other tests here stand on: paths that can be cut, and hosts of which nothing is left."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


def test_a_lost_host_is_silent(network: HostNetwork, tmp_path: Path) -> None:
    speak = (
        "import socket, sys; "
        "end = socket.create_connection((sys.argv[1], int(sys.argv[2]))); "
        "end.sendall(b'1'); end.recv(1)"
    )
    with socket.create_server((network.address(HERE), 0)) as server:
        port = str(server.getsockname()[1])
        words = [sys.executable, "-c", speak, network.address(HERE), port]
        with (
            _frames_from("h0", network) as frames,
            network.hosts["h0"].popen(words, tmp_path / "log", {}),
            server.accept()[0] as connection,
        ):
            assert connection.recv(1) == b"1"
            assert frames(0.1)
            network.lose("h0")
            frames(0.0)
            assert not frames(1.0)  # its kernel would say again that the connection is closed


@contextlib.contextmanager
def _frames_from(name: str, network: HostNetwork) -> Iterator[Callable[[float], int]]:
    """How many come here within some seconds, for whomever they are."""
    sender = bytes.fromhex(network.hardware(name).replace(":", ""))
    all_protocols = socket.htons(0x0003)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, all_protocols) as device:
        device.bind((network.device, 0))

        def count(within_s: float) -> int:
            until, found = time.monotonic() + within_s, 0
            while select.select([device], [], [], max(0.0, until - time.monotonic()))[0]:
                found += device.recv(100)[6:12] == sender
            return found

        yield count


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
