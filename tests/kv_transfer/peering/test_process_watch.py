from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from kv_transfer.peering import ProcessIdentity
from kv_transfer.peering.passport import start_time_of
from kv_transfer.peering.process_watch import ProcessExited, watch
from tests.kv_transfer.pools import TIMEOUT_S


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    start_time = start_time_of(process.pid)
    assert start_time is not None
    return msgspec.structs.replace(ProcessIdentity.own(), pid=process.pid, start_time=start_time)


def has_exited(pidfd: int, within_s: float) -> bool:
    return bool(select.select([pidfd], [], [], within_s)[0])


def test_a_process_is_seen_to_exit(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child)
    pidfd = watch(identity)
    assert pidfd is not None
    assert not has_exited(pidfd, 0)
    child.kill()
    assert has_exited(pidfd, TIMEOUT_S)
    os.close(pidfd)
    child.wait(TIMEOUT_S)
    with pytest.raises(ProcessExited):
        watch(identity)


def test_a_process_that_got_its_pid_is_another(child: subprocess.Popen[bytes]) -> None:
    later = identity_of(child)
    earlier = msgspec.structs.replace(later, start_time=later.start_time - 1)
    with pytest.raises(ProcessExited):
        watch(earlier)


def test_a_zombie_has_exited(child: subprocess.Popen[bytes]) -> None:
    """Nobody has waited for it, so that its pid is not free yet."""
    identity = identity_of(child)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    pidfd = watch(identity)
    assert pidfd is not None
    assert has_exited(pidfd, 0)
    os.close(pidfd)


def test_identities() -> None:
    own = ProcessIdentity.own()
    assert own == ProcessIdentity.own()
    assert own.sees_pids_of(own)
    elsewhere = {"boot_id": "another", "pid_namespace": 1}
    for field, value in elsewhere.items():
        other = msgspec.structs.replace(own, **{field: value})
        assert not own.sees_pids_of(other)
        assert other.host_id != own.host_id
    other = msgspec.structs.replace(own, network_namespace=1)
    assert own.sees_pids_of(other)
    assert other.host_id != own.host_id
