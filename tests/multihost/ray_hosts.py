"""A Ray cluster over hosts of their own: one head, where no node is placed, and the others."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cluster.directory_config import DirectoryAddress
from cluster.ray_mode.spec import ClusterReport, MemberReport, Spec, pack
from tests.multihost.host import PRIVATE
from tests.multihost.host_network import HostNetwork
from tests.ray import living_nodes

HEAD = "h0"
_PORT = 6379
_START_S = 90.0
_OBJECT_STORE_BYTES = 80_000_000
_SYSTEM_CONFIG = {  # a host that says nothing is dead after 15 s rather than 60
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
}
_LAST_WORDS = 3000


class Refused(Exception):
    """What the driver said about an order, as `label: message`."""


class RayHosts:
    """A context. Hosts end with their network, so there is nothing else to end."""

    def __init__(self, network: HostNetwork, shared: Path) -> None:
        self.network = network
        self._shared = shared
        self._directory = shared / PRIVATE / "ray"  # of Ray's own files
        self._token = shared / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        self._environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Returns when it runs on all hosts."""
        for names in ([HEAD], [name for name in self.network.hosts if name != HEAD]):
            for name in names:
                self._launch(name)
            for name in names:
                self._wait_for(name)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    @property
    def address(self) -> str:
        return f"{self.network.address(HEAD)}:{_PORT}"

    def check_all_live(self) -> None:
        """Raises AssertionError: the head misses some, whose Ray said this at last."""
        asking = self.network.hosts[HEAD].run(
            *living_nodes.command(self.address),
            environment=self._environment,
            timeout_s=living_nodes.TIMEOUT_S,
        )
        living = living_nodes.living_nodes(asking)
        missing = [name for name in self._processes if self.network.address(name) not in living]
        assert not missing, "\n".join(f"{name}: {self._last_words(name)}" for name in missing)

    def kill_ray(self, name: str) -> None:
        """All its processes on this host, those of actors as well, at once."""
        self.network.hosts[name].kill_all()

    def start_anew(self, name: str) -> None:
        """Ray on a worker's host that has just been switched on, whatever was there before."""
        self.network.lose(name)
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        self.network.bring_back(name)
        self._launch(name)
        self._wait_for(name)

    def _launch(self, name: str) -> None:
        log = self._log(name)
        log.unlink(missing_ok=True)
        process = self.network.hosts[name].popen(self._command(name), log, self._environment)
        self._processes[name] = process

    def _wait_for(self, name: str) -> None:
        until = time.monotonic() + _START_S
        while "Ray runtime started" not in (said := self._log(name).read_text(errors="replace")):
            assert self._processes[name].poll() is None, said
            assert time.monotonic() < until, said
            time.sleep(0.1)

    def _log(self, name: str) -> Path:
        return self._shared / f"ray-{name}.log"

    def _last_words(self, name: str) -> str:
        logs = self.network.hosts[name].path(self._directory) / "session_latest" / "logs"
        texts = [self._log(name).read_text(errors="replace")]
        for log in (logs / "raylet.out", logs / "raylet.err"):
            with contextlib.suppress(OSError):  # its host has ended, or it has never been written
                texts.append(log.read_text(errors="replace"))
        return "\n".join(text[-_LAST_WORDS:] for text in texts)

    def _command(self, name: str) -> list[str]:
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--num-cpus=0"]
        head += [f"--system-config={json.dumps(_SYSTEM_CONFIG)}"]
        role = head if name == HEAD else [f"--address={self.address}", "--num-cpus=1"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
            f"--node-ip-address={self.network.address(name)}",
            f"--temp-dir={self._directory}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
        ]

    # ------------------------------------------------------------------ clusters

    @contextlib.contextmanager
    def driver(self) -> Iterator[RemoteDriver]:
        """A process on the head's host."""
        words = [sys.executable, "-m", "tests.multihost.driver", str(self._shared / "state")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        host, log = self.network.hosts[HEAD], self._shared / "driver.log"
        with host.popen(words, log, self._environment, **pipes) as process:
            driver = RemoteDriver(process, log)
            try:
                yield driver
            finally:
                assert process.stdin is not None
                process.stdin.close()

    @contextlib.contextmanager
    def up(self, spec: Spec) -> Iterator[RemoteDriver]:
        """A cluster that serves, from one on the head's host; afterwards it has ended.

        Raises Refused.
        """
        with self.driver() as driver:
            driver.order("up", spec=base64.b64encode(pack(spec)).decode())
            try:
                yield driver
            finally:
                self.network.heal_all()
                driver.order("down")


class RemoteDriver:
    """The other end of `tests.multihost.driver`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def order(self, order: str, **told: str) -> Any:
        """Raises Refused."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"order": order, **told}).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        assert line, self._log.read_text()[-3000:]
        answer = json.loads(line)
        if "label" in answer:
            raise Refused(f"{answer['label']}: {answer['message']}")
        return answer["done"]

    def report(self) -> ClusterReport:
        return msgspec.convert(self.order("report"), ClusterReport)

    def directory(self) -> DirectoryAddress:
        return msgspec.convert(self.order("directory"), DirectoryAddress)

    def members(self) -> Mapping[str, MemberReport]:
        return {member.name: member for member in self.report().members}
