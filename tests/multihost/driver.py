"""Runs on a host of the Ray cluster: what `kvrelay up` and the commands after it do, as told.

A line of JSON for each order and each answer. `up` comes with a packed `Spec`, and what keeps the
cluster from coming up is an answer too.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from cluster.ray_mode.memory import MemoryStore
from cluster.ray_mode.ray_cluster import RayCluster
from cluster.ray_mode.spec import Spec, unpack
from protocol import KvrelayError


class Driver:
    """Has one cluster at a time."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._cluster: RayCluster | None = None

    def obey(self, order: dict[str, Any]) -> object:
        """Raises KvrelayError: what could not be done."""
        match order:
            case {"order": "up", "spec": spec}:
                told = unpack(base64.b64decode(spec))
                assert isinstance(told, Spec), told
                self._cluster = RayCluster.up(told, self._state_dir, lambda stage: None)
            case {"order": "down"}:
                self._running.down()
                return None
            case {"order": "directory"}:
                return _directory_of(self._running)
            case {"order": "drain", "node": node}:
                self._running.drain(node, None)
            case {"order": "undrain", "node": node}:
                self._running.undrain(node)
        return msgspec.to_builtins(self._running.report())

    @property
    def _running(self) -> RayCluster:
        assert self._cluster is not None
        return self._cluster


def _directory_of(cluster: RayCluster) -> object:
    """Where it is and its password, which this test's own gateway needs."""
    memory = MemoryStore(cluster.known.name).load()
    assert memory is not None
    return msgspec.to_builtins(memory.directory)


def main() -> None:
    driver = Driver(Path(sys.argv[1]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # for whatever else wants to say something
    for line in sys.stdin:
        try:
            answer = {"done": driver.obey(json.loads(line))}
        except KvrelayError as error:
            answer = {"label": error.label, "message": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
