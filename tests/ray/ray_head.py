"""A Ray of the tests' own, of which nothing may be left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.ray_config import RayConfig
from cluster.ray_mode.local_ray import KnownCluster, start_ray, stop_ray, use_token_of

NUM_CPUS = 4  # as many processes does Ray start for nothing, so they are few
_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_GONE_S = 10.0


@contextlib.contextmanager
def ray_head(name: str = "tests") -> Iterator[KnownCluster]:
    """One that runs; this process may become its driver. Afterwards nothing is left of it."""
    shared_memory = set(os.listdir("/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        for variable in _TOKEN_VARIABLES:
            patch.delenv(variable, raising=False)
        try:
            head = start_ray(name, RayConfig(), NUM_CPUS)
            try:
                use_token_of(head)
                _read_token_again()
                yield head
            finally:
                disconnect()
                stop_ray(head)
        finally:
            for variable in _TOKEN_VARIABLES:
                os.environ.pop(variable, None)
            _read_token_again()
    check_nothing_left(head, shared_memory)


def _read_token_again() -> None:
    """Ray looks at its environment once, when it is imported, and a test before may have done that.

    A command has it in time: it imports Ray after it knows the token.
    """
    from ray._private.authentication_test_utils import reset_auth_token_state

    reset_auth_token_state()


def disconnect() -> None:
    import ray

    ray.shutdown()


def check_nothing_left(head: KnownCluster, shared_memory: set[str]) -> None:
    assert head.temp_dir is not None
    assert not head.temp_dir.exists()
    assert wait_until(lambda: not processes_of(head)), processes_of(head)

    def left() -> set[str]:
        """Of anybody, for as long as it takes others to remove theirs."""
        names = set(os.listdir("/dev/shm")) - shared_memory
        return {name for name in names if "plasma" in name or "kvrelay" in name}

    assert wait_until(lambda: not left()), left()


def wait_until(condition: Any, within_s: float = _GONE_S) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def processes_of(head: KnownCluster) -> dict[int, str]:
    """All that belong to it, by their numbers; those of nodes and gateways as well."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                group = int((entry / "stat").read_text().rpartition(")")[2].split()[2])
                if group == head.pid:
                    found[int(entry.name)] = (entry / "cmdline").read_text()[:80]
    return found


def pid_of_actor(name: str, namespace: str) -> int:
    """Of the process that the actor has now. Raises LookupError: none lives."""
    import ray
    from ray._private.state import actors

    try:
        handle = ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        raise LookupError(name) from error
    found = actors(handle._actor_id.hex())
    if found.get("State") != "ALIVE":
        raise LookupError(name)
    return int(found["Pid"])
