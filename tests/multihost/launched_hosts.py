"""Hosts with nothing but ssh, on which `kvrelay up` starts Ray by `deploy/on-premises.yaml`.

h0   head: where somebody types `kvrelay up`; gateway, directory
h1   a prefill node
h2   a decode node
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

import yaml

from tests.deploy.deployments import kvrelay_file
from tests.multihost.host import PRIVATE, Host
from tests.multihost.host_network import HostNetwork
from tests.ray.ray_head import wait_until

HEAD, PREFILL, DECODE = "h0", "h1", "h2"
BIN = Path(sys.executable).parent
_SERVER = Path("/usr/sbin/sshd")
_START_S = 30.0
_COMMAND_S = 180.0
# What the file says, and which of our hosts it is.
_EXAMPLES = {"10.0.0.10": HEAD, "10.0.0.11": PREFILL}


def missing_for_ssh() -> str:
    """Why nothing can be launched here; empty: it can."""
    absent = [name for name in ("ssh", "ssh-keygen", "rsync", "ps") if shutil.which(name) is None]
    absent += [] if _SERVER.exists() else [_SERVER.name]
    return f"needs {', '.join(absent)}" if absent else ""


class LaunchedHosts:
    """A context. Whoever has its key can log in at each host, as root, whose home is another."""

    def __init__(self, network: HostNetwork, shared: Path) -> None:
        """`shared` is not below /tmp, of which each host has its own."""
        self.network = network
        self.file = shared / "cluster.yaml"
        self._shared = shared
        self._home = shared / PRIVATE / "home"
        self._key = shared / "key"
        self._host_key = shared / "host_key"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            for key in (self._key, self._host_key):
                make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
                subprocess.run(make, check=True)
            for host in self.network.hosts.values():
                self._furnish(host)
                self._listen(host)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _furnish(self, host: Host) -> None:
        checkout, kept = str(BIN.parents[1]), f"{self._shared}/{PRIVATE}/checkout"
        host.run("mkdir", kept)
        host.run("mount", "--bind", checkout, kept)
        for directory in ("/tmp", "/run"):
            host.run("mount", "-t", "tmpfs", "tmpfs", directory)
        host.run("mkdir", "-p", checkout)  # which may be below these
        host.run("mount", "--bind", kept, checkout)
        host.run("mkdir", "-p", "/run/sshd", f"{self._home}/kvrelay")
        host.run("ln", "-s", str(BIN), f"{self._home}/kvrelay/bin")
        host.cover(
            "/etc/passwd",
            f"root:x:0:0:root:{self._home}:/bin/bash\n"
            "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n",
        )

    def _listen(self, host: Host) -> None:
        options = {
            "HostKey": self._host_key,
            "AuthorizedKeysFile": f"{self._key}.pub",
            "StrictModes": "no",  # who owns the directories above the key does not matter here
            "PermitRootLogin": "prohibit-password",
            "PidFile": "none",
        }
        words = [str(_SERVER), "-D", "-e", "-f", "/dev/null"]
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        log = self._shared / f"sshd-{host.name}.log"
        process = host.popen(words, log, {})
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        listens = wait_until(lambda: "Server listening" in log.read_text(), _START_S)
        assert listens, log.read_text()

    # ------------------------------------------------------------------ what is launched

    def write_file(self, model: Path) -> None:
        """The file, with what everybody has to put in, and one small node of each role."""
        settings = kvrelay_file("on-premises")
        settings["model"] = str(model)
        for role in ("prefill", "decode"):
            settings[role] |= {"count": 1, "num_cpus": 1}
        settings["decode"]["cache"]["kv_memory"] = "64MiB"
        launcher = settings["ray"]["launcher"]
        launcher["auth"] = {"ssh_user": "root", "ssh_private_key": str(self._key)}
        launcher["provider"]["worker_ips"] = [self.address(PREFILL), self.address(DECODE)]
        # What the others install is on the disk that all hosts share.
        launcher["setup_commands"] = [c for c in launcher["setup_commands"] if ".bashrc" in c]
        del launcher["file_mounts"]["~/kvrelay-dist"]
        text = yaml.safe_dump(settings).replace("10.0.0.0/8", f"{self.address(HEAD)}/24")
        for example, name in _EXAMPLES.items():
            text = text.replace(example, self.address(name))
        self.file.write_text(text)

    def check_on_head(self, command: str) -> str:
        """What it prints. Raises AssertionError: it has failed."""
        done = self.on_head(command)
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def on_head(self, command: str) -> subprocess.CompletedProcess[str]:
        """What somebody types who has logged in there."""
        environment = {
            "HOME": str(self._home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
        }
        return subprocess.run(
            self.network.hosts[HEAD].command("bash", "-c", command),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )

    def processes_of_ray(self) -> dict[str, list[str]]:
        """On each host."""
        lines = {name: host.run("ps", "-eo", "args") for name, host in self.network.hosts.items()}
        return {
            name: [line for line in said.splitlines() if "raylet" in line or "ray::" in line]
            for name, said in lines.items()
        }

    def address(self, name: str) -> str:
        return self.network.address(name)
