"""A Ray cluster of our own on this machine, and what is known of it from one command to the next.

<state_dir>/<name>.json   who it is, for `status` and `down`
<temp_dir>/               Ray's sessions, its token, our log of its start; removed with it
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from cluster.free_port import free_port
from cluster.ray_config import RayConfig
from protocol import ConfigError, KvrelayError

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05  # a process of another command is nobody's child here
_OBJECT_STORE_BYTES = 80_000_000  # nearly the least that Ray takes; nothing large goes through it
_LAST_LINES = 5
# A socket's path has at most 107 bytes, of which Ray's session and the socket's name take these.
_MAX_TEMP_DIR_BYTES = 107 - len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
_MAX_PORTS = 3  # tried: another program may take one before Ray has got so far as to listen


class RayFailed(KvrelayError):
    """Ray does not start, or cannot be reached, or has another version."""

    label = "ray"


class _PortTaken(RayFailed):
    pass


class KnownCluster(msgspec.Struct, frozen=True, kw_only=True):
    """What commands after `up` have to know."""

    name: str
    address: str  # of Ray
    temp_dir: Path | None = None  # of a Ray of our own
    pid: int = 0  # of it, the leader of its process group
    started: int = 0  # that process's start time, so that another with its number is not it
    launcher: dict[str, Any] | None = None  # of hosts that Ray's launcher has started


class StateFile:
    """One cluster's file in `state_dir`."""

    def __init__(self, state_dir: Path, name: str) -> None:
        self.path = state_dir / f"{name}.json"

    def read(self) -> KnownCluster | None:
        """None: there is none. Raises ConfigError: it is not ours."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=KnownCluster, dec_hook=lambda kind, v: kind(v))
        except msgspec.MsgspecError as error:
            raise ConfigError("state", f"{self.path} cannot be read: {error}") from error

    def write(self, known: KnownCluster) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(msgspec.json.encode(known, enc_hook=str))

    def restore(self, before: KnownCluster | None) -> None:
        """As it was read before."""
        self.remove() if before is None else self.write(before)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others may be there
            self.path.parent.rmdir()


def use_token_of(known: KnownCluster) -> None:
    """Have Ray prove itself with the token of a cluster of our own. Before Ray is imported."""
    if known.temp_dir is not None:
        _use_token(known.temp_dir)


def start_ray(name: str, config: RayConfig, num_cpus: int) -> KnownCluster:
    """A head on this machine that outlives us, with a token that only this user can read.

    Raises:
        RayFailed: it does not start; says what it said.
    """
    for tries_left in reversed(range(_MAX_PORTS)):
        try:
            return _start_at(free_port(config.host), name, config, num_cpus)
        except _PortTaken:
            if not tries_left:
                raise
    raise AssertionError


def _start_at(port: int, name: str, config: RayConfig, num_cpus: int) -> KnownCluster:
    temp_dir = Path(tempfile.mkdtemp(prefix=f"kvrelay-{name}-"[:24]))
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(shutil.rmtree, temp_dir, ignore_errors=True)
        _check_length(temp_dir)
        token = temp_dir / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        _use_token(temp_dir)
        process = _launch(temp_dir, config.host, port, num_cpus)
        on_failure.callback(_end_group, process.pid)
        _wait_for(process, temp_dir)
        on_failure.pop_all()
    process.returncode = 0  # it is left alone, which Popen would warn of
    return KnownCluster(
        name=name,
        address=f"{config.host}:{port}",
        temp_dir=temp_dir,
        pid=process.pid,
        started=_start_time(process.pid) or 0,
    )


def stop_ray(known: KnownCluster) -> None:
    """End all its processes and remove its files. Harmless if it is gone already."""
    if known.temp_dir is None:
        return
    if known.pid and _start_time(known.pid) == known.started:
        _end_group(known.pid)
    shutil.rmtree(known.temp_dir, ignore_errors=True)


def runs(known: KnownCluster) -> bool:
    """Whether a Ray of our own is still there."""
    return bool(known.pid) and _start_time(known.pid) == known.started


def _check_length(temp_dir: Path) -> None:
    """Raises ConfigError: the paths of Ray's sockets below it would be too long for the system."""
    if len(os.fsencode(temp_dir)) > _MAX_TEMP_DIR_BYTES:
        raise ConfigError(
            "TMPDIR",
            f"{temp_dir.parent} is too long for the sockets that Ray puts below it; a path of at "
            f"most {_MAX_TEMP_DIR_BYTES - len(temp_dir.name) - 1} bytes will do",
        )


def _launch(temp_dir: Path, host: str, port: int, num_cpus: int) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        f"--node-ip-address={host}",
        f"--port={port}",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={temp_dir}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    with open(temp_dir / "start.log", "wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C here is not meant for it
        )


def _use_token(temp_dir: Path) -> None:
    """Here, and in processes that are started from here on."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(temp_dir / "token")


def _wait_for(process: subprocess.Popen[bytes], temp_dir: Path) -> None:
    log = temp_dir / "start.log"
    until = time.monotonic() + _START_TIMEOUT_S
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            said = " / ".join(lines[-_LAST_LINES:]) or "nothing"
            kind = _PortTaken if "start the grpc server" in said else RayFailed
            raise kind(f"Ray did not start on {log.parent}; it said: {said}")
        time.sleep(_POLL_S)


def _end_group(pid: int) -> None:
    """Ray's own order to stop goes to the leader, which ends the others; then all that are left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_TIMEOUT_S
    while _group_lives(pid) and time.monotonic() < until:
        _reap(pid)
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _reap(pid)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _start_time(pid: int) -> int | None:
    """In clock ticks since the machine started; None: there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] == "Z" else int(after_name[19])
