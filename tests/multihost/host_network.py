"""Hosts of their own and this process, on one network whose paths can be cut one by one.

    here ──┐
    h0  ───┤ switch        each end knows the others' hardware addresses; where a path is cut, it
    h1  ───┤               knows a wrong one, so what it sends is lost without a word:
    h2  ───┘               no link goes down, nobody refuses anything

The switch is in a namespace too, so that nothing is left of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.multihost.host import Host

HERE = "here"
_NOBODY = "02:00:00:00:ff:ff"
_DEVICE = "eth0"


class HostNetwork:
    """A context, at whose end all hosts have ended."""

    def __init__(self, names: Iterable[str], shared: Path) -> None:
        self._names = (HERE, *names)
        self._third = os.getpid() % 250 + 1  # so that two such networks do not meet here
        self.device = f"kvr{os.getpid()}"  # of this process
        self._cut: set[frozenset[str]] = set()
        self._shared = shared
        self._plugged: set[str] = set()
        self._stack = contextlib.ExitStack()
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        with self._stack:
            addresses = {name: self.address(name) for name in self._names}
            self._switch = self._host("switch", {})
            self._switch.run("ip", "link", "add", "switch", "type", "bridge")
            self._switch.run("ip", "link", "set", "switch", "up")
            self._connect(HERE)
            for name in self._names[1:]:
                self.hosts[name] = self._host(name, addresses)
                self._connect(name)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in (self._switch, *self.hosts.values()):
            host.kill()  # all at once, since the kernel takes a second for each
        self._stack.close()

    def _host(self, name: str, addresses: dict[str, str]) -> Host:
        host = Host(name, "" if name == "switch" else self.address(name), self._shared, addresses)
        self._stack.callback(host.end)
        return host

    def address(self, name: str) -> str:
        """Of a host, or of this process."""
        return f"198.18.{self._third}.{self._number(name)}"

    def _number(self, name: str) -> int:
        return 254 if name == HERE else self._names.index(name)

    # ------------------------------------------------------------------ paths

    def cut(self, one: str, other: str) -> None:
        """From now on nothing that one of them sends reaches the other."""
        self._cut.add(frozenset((one, other)))
        self._introduce(one, other)

    def heal(self, one: str, other: str) -> None:
        """Harmless if the path was not cut."""
        self._cut.discard(frozenset((one, other)))
        self._introduce(one, other)

    def heal_all(self) -> None:
        for pair in list(self._cut):
            self.heal(*pair)

    @contextlib.contextmanager
    def without(self, one: str, other: str) -> Iterator[None]:
        """The path between these two is cut meanwhile."""
        self.cut(one, other)
        try:
            yield
        finally:
            self.heal(one, other)

    def lose(self, name: str) -> None:
        """A host loses its power: nobody hears of it any more. Harmless if it is lost already.

        Its kernel goes on for a minute about connections that nobody has closed in time. With the
        cable still in, the switch would send there what is meant for the host that comes after it.
        """
        if name in self._plugged:
            self._plugged.remove(name)
            self._switch.run("ip", "link", "delete", name)
        self.hosts[name].end()

    def bring_back(self, name: str) -> None:
        """A host that is lost, with its paths."""
        self.hosts[name].start_again()
        self._cut -= {pair for pair in self._cut if name in pair}
        self._connect(name)

    def _connect(self, name: str) -> None:
        """A cable from its device to the switch, and a line about it for all others."""
        mine = self.device if name == HERE else _DEVICE
        end = os.getpid() if name == HERE else self.hosts[name].pid
        self._run(
            HERE,
            *("ip", "link", "add", name, "netns", str(self._switch.pid), "type", "veth"),
            *("peer", "name", mine, "address", self.hardware(name), "netns", str(end)),
        )
        self._plugged.add(name)
        self._switch.run("ip", "link", "set", name, "master", "switch", "up")
        self._run(name, "ip", "address", "add", f"{self.address(name)}/24", "dev", mine)
        self._run(name, "ip", "link", "set", mine, "up")
        if name != HERE:  # so programs find out which address the outside would know
            self._run(name, "ip", "route", "add", "default", "via", self.address(HERE))
        for one, other in itertools.combinations((HERE, *self.hosts), 2):
            if name in (one, other):
                self._introduce(one, other)

    def _introduce(self, one: str, other: str) -> None:
        for teller, told in ((one, other), (other, one)):
            if teller == HERE or self.hosts[teller].alive:
                whom = _NOBODY if frozenset((one, other)) in self._cut else self.hardware(told)
                device = self.device if teller == HERE else _DEVICE
                neighbour = (self.address(told), "lladdr", whom, "dev", device, "nud", "permanent")
                self._run(teller, "ip", "neighbour", "replace", *neighbour)

    def hardware(self, name: str) -> str:
        """The address of its device."""
        return f"02:00:00:00:00:{self._number(name):02x}"

    def _run(self, name: str, *words: str) -> None:
        if name == HERE:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        else:
            self.hosts[name].run(*words)
