"""Several hosts of a Ray cluster on this machine, each started by a command as it is written.

    /tmp/kvr…/               the home of the hosts' user
        .ray/auth_token
        kvrelay/bin/ray      Ray, but for what a machine has only once: addresses, ports, sizes
        kvrelay/bin/hostname the address that the host would have
        <host>/              Ray's own files

Whatever a command starts is marked, so that just these processes are ended.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.free_port import free_port
from tests.marked_processes import MarkedProcesses
from tests.ray import living_nodes

_STARTED = "Ray runtime started"
_POLL_S = 0.05  # for what other processes do, of which nobody tells
_RAY = """#!/bin/bash
# `ray stop` would end whatever Ray runs here, and --autoscaling-config starts what uses ssh.
test "$1" = start || exit 0
words=()
for word in "$@"; do
    case "$word" in --autoscaling-config=*) ;; *) words+=("$word") ;; esac
done
printf '%s\\n' "${words[@]}" > "$TEST_WORDS"
test -z "$TEST_OPTIONS" || exec @python -m ray.scripts.scripts "${words[@]}" $TEST_OPTIONS
"""
_HOSTNAME = """#!/bin/bash
echo "$TEST_ADDRESS 172.17.0.1"
"""


@dataclass
class RayHosts:
    """A context: everything is ended and removed at its end."""

    home: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="kvr", dir="/tmp")))
    processes: MarkedProcesses = field(default_factory=MarkedProcesses)
    _port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    _shells: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Self:
        binaries = self.home / "kvrelay" / "bin"
        binaries.mkdir(parents=True)
        _write_program(binaries / "ray", _RAY.replace("@python", sys.executable))
        _write_program(binaries / "hostname", _HOSTNAME)
        token = self.home / ".ray" / "auth_token"
        token.parent.mkdir()
        token.write_text(secrets.token_hex(32))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.processes.kill()
        for shell in self._shells:
            shell.wait()
        shutil.rmtree(self.home)

    @property
    def head(self) -> str:
        """The address of the Ray cluster."""
        return f"127.0.0.31:{self._port}"

    def words(self, command: str, address: str = "") -> list[str]:
        """What a command would say to Ray, on a host with this address."""
        words = self.home / "words"
        subprocess.run(
            ["bash", "-c", command],
            env=self._environment(words, "", address),
            check=True,
            timeout=10,
        )
        return words.read_text().splitlines()

    def start_head(self, command: str, variables: dict[str, str]) -> None:
        """The first host."""
        own = f"--port={self._port} --dashboard-port={free_port('127.0.0.1')}"
        self._start("head", command, "127.0.0.31", own, variables, "")

    def start_worker(
        self, name: str, command: str, variables: dict[str, str], address: str = ""
    ) -> None:
        """When the head takes workers. `address`: that of its host, which is another one here."""
        while not self._answers():
            assert self._shells[0].poll() in (None, 0), self.log("head")
            time.sleep(_POLL_S)
        number = 31 + len(self._shells)
        own = f"--address={self.head} --num-cpus=1"
        self._start(name, command, f"127.0.0.{number}", own, variables, address)

    def wait_until_started(self, name: str, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while _STARTED not in self.log(name):
            assert time.monotonic() < until, self.log(name)
            time.sleep(_POLL_S)

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text(errors="replace")

    def living_nodes(self, variables: dict[str, str]) -> dict[str, dict[str, float]]:
        """The resources of each, by its address, as Ray's head knows them."""
        answer = subprocess.run(
            living_nodes.command(self.head),
            env=self._environment(self.home / "words", "", "") | variables,
            capture_output=True,
            check=True,
            timeout=living_nodes.TIMEOUT_S,
        )
        return living_nodes.living_nodes(answer.stdout)

    def _start(
        self,
        name: str,
        command: str,
        node_address: str,
        own: str,
        variables: dict[str, str],
        address: str,
    ) -> None:
        options = (
            f"--node-ip-address={node_address} --temp-dir={self.home / name} {own} "
            "--node-manager-port=0 --object-manager-port=0 --runtime-env-agent-port=0 "
            "--dashboard-agent-listen-port=0 --metrics-export-port=0 "
            "--min-worker-port=0 --max-worker-port=0 "
            "--object-store-memory=80000000 --include-log-monitor=false"
        )
        environment = self._environment(self.home / "words", options, address) | variables
        with (self.home / f"{name}.log").open("wb") as log:
            self._shells.append(
                subprocess.Popen(
                    ["bash", "-c", command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _environment(self, words: Path, options: str, address: str) -> dict[str, str]:
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("RAY_", "PYTEST"))}
        return inherited | {
            "HOME": str(self.home),
            "PATH": f"{self.home}/kvrelay/bin:{os.environ['PATH']}",
            "TEST_WORDS": str(words),
            "TEST_OPTIONS": options,
            "TEST_ADDRESS": address,
            "RAY_USAGE_STATS_ENABLED": "0",
            self.processes.variable: self.processes.mark,
        }

    def _answers(self) -> bool:
        host, _, port = self.head.rpartition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
