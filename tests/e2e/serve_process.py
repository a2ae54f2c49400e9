"""`kvrelay serve` as its users have it: a process, known by what it prints and answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

KVRELAY = Path(sys.executable).with_name("kvrelay")
REAL_MODEL = "smollm2-135m"

_READY = re.compile(r"ready\s+(http://\S+)/v1 ")
# For what takes seconds and moments on a machine that is not busy with something else.
_READY_S = 60.0
_MOMENT_S = 30.0
_POLL_S = 0.02


def run_kvrelay(
    *arguments: str | Path, timeout_s: float = _READY_S
) -> subprocess.CompletedProcess[str]:
    """A command that should end by itself, and what it printed."""
    return subprocess.run(
        [KVRELAY, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=timeout_s,
        check=False,
    )


def until(condition: Callable[[], object], what: str, timeout_s: float = _MOMENT_S) -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(_POLL_S)


class ServeProcess:
    """Starts at once; its output goes to files, so that it never waits for a reader."""

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                self._command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=_environment(),
                start_new_session=True,  # so that whatever it starts can be found
            )
        self.url = ""  # known when it is ready

    def _command(self, *arguments: str | Path) -> list[str | Path]:
        return [KVRELAY, "serve", *arguments, "--port", "0"]

    @property
    def output(self) -> str:
        return self._stdout.read_text()

    @property
    def errors(self) -> str:
        return self._stderr.read_text()

    @property
    def log(self) -> str:
        return f"--- stdout\n{self.output}--- stderr\n{self.errors}"

    @property
    def pid(self) -> int:
        """Also of its process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until_printed(self, text: str) -> None:
        until(lambda: text in self.output or not self.is_running, f"printed {text!r}", _READY_S)
        assert text in self.output, f"ended with status {self._process.returncode}\n{self.log}"

    def wait_until_ready(self) -> None:
        self.wait_until_printed("ready")
        found = _READY.search(self.output)
        assert found is not None, self.log
        self.url = found[1]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """The exit status."""
        return self._process.wait(timeout_s)

    def has_descendants(self) -> bool:
        """Whether anything that it started is still there."""
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        if self.is_running:
            self._process.kill()
            self._process.wait()

    # ------------------------------------------------------------------ by HTTP

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(**self._client_options(), **options)

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**self._client_options(), **options)

    def cluster(self) -> dict[str, Any]:
        with self.client() as client:
            answer: dict[str, Any] = client.get("/cluster").raise_for_status().json()
            return answer

    def node(self, role: str) -> dict[str, Any]:
        """The first node of a role."""
        return next(node for node in self.cluster()["nodes"] if node["role"] == role)

    def wait_until_at_rest(self) -> None:
        """Wait until no node has anything of any request."""
        until(lambda: is_at_rest(self.cluster()), "nothing is left of requests")

    def _client_options(self) -> dict[str, Any]:
        return {"base_url": self.url, "timeout": 60.0, "trust_env": False}


class UpProcess(ServeProcess):
    """`kvrelay up` that stays."""

    def _command(self, *arguments: str | Path) -> list[str | Path]:
        return [KVRELAY, "up", *arguments, "--foreground"]


@contextmanager
def serving(folder: Path, *arguments: str | Path) -> Iterator[ServeProcess]:
    """A server that is ready, and that has ended in order afterwards."""
    server = ServeProcess(folder, *arguments)
    try:
        server.wait_until_ready()
        yield server
        assert server.is_running, server.log
        server.send(signal.SIGTERM)
        assert server.wait(_MOMENT_S) == 0, server.log
        assert "Traceback" not in server.errors, server.log
    finally:
        server.kill()


def is_at_rest(cluster: dict[str, Any]) -> bool:
    """Whether no request, transfer or used block is left. All blocks must add up at any time."""
    for node in cluster["nodes"]:
        blocks = node["blocks"]
        parts = [blocks[state] for state in ("used", "cached", "free", "quarantined")]
        assert sum(parts) == blocks["total"] == node["num_blocks"], node
    return not cluster["num_requests"] and all(map(_is_idle, cluster["nodes"]))


def _is_idle(node: dict[str, Any]) -> bool:
    blocks = node["blocks"]
    return not (
        any(node["queues"].values())
        or node["queued_tokens"]
        or node["transfers"]["active"]
        or blocks["used"]
        or blocks["quarantined"]
    )


def _environment() -> dict[str, str]:
    """Ours, without what would change the command's behaviour."""
    return {k: v for k, v in os.environ.items() if k not in ("KVRELAY_API_KEY", "PYTHONUNBUFFERED")}
