"""A host of its own on this machine: whatever a machine has only once, it has as well.

    namespaces   network, processes, mounts, name, shared memory (System V)
    mounts       /dev/shm, a directory for Ray, the id of the boot, /etc/hosts, no name server

Its processes see neither each other's abstract sockets nor each other's numbers across hosts. They
share the disk. Its first process ends with this one, and all others in there with that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.ray.ray_head import wait_until

PRIVATE = "private"  # the directory, below the one that all share, that each host has for itself
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
_FIRST_PROCESS = (
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); sys.stdin.read()"
)
_PROGRAMS = ("ip", "unshare", "nsenter", "mount", "hostname")
_TIMEOUT_S = 30.0


def missing() -> str:
    """Why there can be no such hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "needs root"
    if absent := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"needs {', '.join(absent)}"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """Runs from its making to `end`, which is like pulling the plug."""

    def __init__(self, name: str, address: str, shared: Path, hosts: Mapping[str, str]) -> None:
        """`shared` is a directory that all hosts see; `hosts`: addresses by name."""
        self.name = name
        self.address = address
        self._shared = shared
        self._hosts = hosts
        self._start()

    def _start(self) -> None:
        unshare = ("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc")
        self._holder = subprocess.Popen(
            [*unshare, sys.executable, "-S", "-c", _FIRST_PROCESS], stdin=subprocess.PIPE
        )
        self._pid = self._wait_for_first_process()
        self._set_up()

    def _wait_for_first_process(self) -> int:
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        until = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < until:
            for pid in map(int, children.read_text().split()):
                with contextlib.suppress(OSError):  # it mounts its /proc after it has forked
                    if b"sys.stdin.read" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return pid
            time.sleep(0.02)
        raise TimeoutError(f"{self.name} did not start")

    def _set_up(self) -> None:
        private = self._shared / PRIVATE
        private.mkdir(exist_ok=True)
        self.run("ip", "link", "set", "lo", "up")
        self.run("hostname", self.name)
        for directory in ("/dev/shm", private):
            self.run("mount", "-t", "tmpfs", "tmpfs", str(directory))
        lines = [f"{address} {name}\n" for name, address in self._hosts.items()]
        self.cover("/etc/hosts", "127.0.0.1 localhost\n" + "".join(lines))
        self.cover("/etc/resolv.conf", "")
        self.cover("/proc/sys/kernel/random/boot_id", f"{uuid.uuid4()}\n")

    def cover(self, path: str, text: str) -> None:
        """What only this host finds in a file."""
        source = self._shared / PRIVATE / Path(path).name
        self.path(source).write_text(text)
        self.run("mount", "--bind", str(source), path)

    def kill(self) -> None:
        """Without waiting for the end of its processes."""
        self._holder.kill()

    def end(self) -> None:
        """All its processes are killed, and its devices vanish. Harmless if it has ended."""
        self.kill()
        self._holder.wait()
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        assert wait_until(lambda: not Path(f"/proc/{self._pid}").exists()), self.name

    def kill_all(self) -> None:
        """All its processes at once; the host goes on."""
        self.run(sys.executable, "-S", "-c", "import os, signal; os.kill(-1, signal.SIGKILL)")

    def start_again(self) -> None:
        """As another one of the same name and address, which has no network yet."""
        self._start()

    # ------------------------------------------------------------------ in there

    @property
    def pid(self) -> int:
        """Of its first process, as seen from here."""
        return self._pid

    @property
    def alive(self) -> bool:
        return self._holder.returncode is None

    def path(self, path: Path) -> Path:
        """Where a file of the host is for us."""
        return Path(f"/proc/{self._pid}/root{path}")

    def command(self, *words: str) -> list[str]:
        """One that runs these words there."""
        return ["nsenter", f"--target={self._pid}", *_NAMESPACES, "--", *words]

    def run(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> str:
        """Its output. Raises AssertionError: it has failed."""
        done = subprocess.run(
            self.command(*words),
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"on {self.name}: {' '.join(words)}: {done.stderr}"
        return done.stdout

    def popen(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str], **pipes: int
    ) -> subprocess.Popen[bytes]:
        """A process there that goes on. What it writes, but to pipes, goes to a file of ours."""
        with log.open("ab") as output:
            options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **pipes}
            return subprocess.Popen(
                self.command(*words),
                env={**os.environ, **environment},
                start_new_session=True,
                **options,  # type: ignore[call-overload]
            )

    @contextlib.contextmanager
    def instead(self, path: Path, other: Path) -> Iterator[None]:
        """This host alone finds other content at this path."""
        self.run("mount", "--bind", str(other), str(path))
        try:
            yield
        finally:
            self.run("umount", "--lazy", str(path))
