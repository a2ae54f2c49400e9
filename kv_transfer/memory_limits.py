"""How much more memory this process can have, as far as the system tells."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroups of version 1 give a number just below 2^63 instead of none


class MemoryLimit(NamedTuple):
    what: str
    available: int  # bytes


def tightest_limit(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> MemoryLimit:
    """The limit that leaves least."""
    return min(_limits(proc, cgroups), key=lambda limit: limit.available)


def _limits(proc: Path, cgroups: Path) -> Iterator[MemoryLimit]:
    yield MemoryLimit("MemAvailable of the host", _read_table(proc / "meminfo")["MemAvailable:"])
    yield from _cgroup_limits(proc / "self/cgroup", cgroups)
    yield from _resource_limits()


def _resource_limits() -> Iterator[MemoryLimit]:
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_size != resource.RLIM_INFINITY:
        yield MemoryLimit("RLIMIT_FSIZE (ulimit -f)", file_size)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        yield MemoryLimit("RLIMIT_AS (ulimit -v)", max(0, space - used))


def _cgroup_limits(membership: Path, cgroups: Path) -> Iterator[MemoryLimit]:
    """Of our group and all around it; in a container its own group is the root that we see."""
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _chain_limits(cgroups, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _chain_limits(cgroups / "memory", path, *names)


def _chain_limits(root: Path, path: str, limit: str, usage: str) -> Iterator[MemoryLimit]:
    group = root / path.lstrip("/")
    groups = [g for g in (group, *group.parents) if g == root or root in g.parents]
    for directory in groups:
        allowed = _read_number(directory / limit)
        used = _read_number(directory / usage)
        if allowed is not None and used is not None and allowed < _UNLIMITED:
            cached = _read_table(directory / "memory.stat").get("inactive_file", 0)
            yield MemoryLimit(f"the cgroup {directory}", max(0, allowed - used + cached))


def _read_number(path: Path) -> int | None:
    """None: there is no such file, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_table(path: Path) -> dict[str, int]:
    """Lines of a name, a number and maybe a unit, which is kB; in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines]
    return {row[0]: int(row[1]) << (10 if row[2:] == ["kB"] else 0) for row in rows if row}
