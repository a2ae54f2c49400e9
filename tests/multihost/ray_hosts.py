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


class Refused(Exception):
    """What the driver said about an order, as `label: message`."""


class RayHosts:
    """A context. Hosts end with their network, so there is nothing else to end."""

    def __init__(self, network: HostNetwork, shared: Path) -> None:
        self.network = network
        self._shared = shared
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

    def start_worker(self, name: str) -> None:
        """Ray on a host that is no head. Returns when it runs."""
        self._launch(name)
        self._wait_for(name)

    def kill_ray(self, name: str) -> None:
        """All its processes on this host, those of actors as well, at once."""
        self.network.hosts[name].kill_all()

    def start_anew(self, name: str) -> None:
        """Ray on a worker's host that has just been switched on, whatever was there before."""
        self.network.hosts[name].end()
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        self.network.bring_back(name)
        self.start_worker(name)

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

    def _command(self, name: str) -> list[str]:
        own, directory = self.network.address(name), self._shared / PRIVATE / "ray"
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--num-cpus=0"]
        head += [f"--system-config={json.dumps(_SYSTEM_CONFIG)}"]
        role = head if name == HEAD else [f"--address={self.address}", "--num-cpus=1"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
            f"--node-ip-address={own}",
            f"--temp-dir={directory}",
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
