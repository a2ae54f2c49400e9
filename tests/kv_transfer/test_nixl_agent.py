"""What NIXL is relied on for, between two processes; the fence of the transport rests on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv_transfer import Extents, PeerRefused
from kv_transfer.transports.nixl_agent import (
    NixlAgent,
    NixlConfig,
    RemotePool,
    TransferState,
    check_version,
    load_nixl,
)
from kv_transfer.transports.nixl_path import parts
from protocol import ConfigError
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, GatedPool, make_pool

NUM_BLOCKS = 1 << 18  # 128 MiB: more than kernels keep on the way
ON_THE_WAY = 16 << 10  # bytes; the beginning of one write is less
QUIET_S = 0.3  # in which nothing may land
PATIENCE_S = TIMEOUT_S + 20.0  # for a child that starts beside other work


class Target:
    """An agent here, and a process that writes to it as long as this one lets bytes in."""

    def __init__(self, transports: str) -> None:
        self.pool = make_pool(NUM_BLOCKS)
        self.bytes = self.pool.bytes
        self.agent = NixlAgent("target", self.pool, NixlConfig(transports=transports))
        arguments = [transports, str(NUM_BLOCKS), "target", str(self.pool.address)]
        arguments += [str(self.agent.port), self.agent.metadata().hex()]
        self.writer = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_transfer.nixl_writer", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )

    def admit(self, *, stranger: bool = False) -> None:
        """The writer says from where it connects. Nobody lets in a stranger."""
        assert self.writer.stdout is not None
        for source in self.writer.stdout.readline().split():
            host, _, port = source.rpartition(":")
            assert int(port)
            if not stranger:
                self.agent.admit([(host, int(port))])

    def let_in_until(self, num_bytes: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.landed() < num_bytes:
            assert time.monotonic() < deadline
            self.agent.progress()

    def wait_for_bytes_on_the_way(self) -> None:
        """Until the kernel has more of them for us; a busy machine may not let the writer run."""
        deadline = time.monotonic() + PATIENCE_S
        while _num_unread(self.agent.port) < ON_THE_WAY:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def let_in_until_it_ends(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.writer.poll() is None:
            assert time.monotonic() < deadline
            self.agent.progress()

    def let_in_all(self) -> None:
        """As much as comes before there is nothing for a while."""
        quiet_since, landed = time.monotonic(), self.landed()
        while time.monotonic() < quiet_since + QUIET_S:
            self.agent.progress()
            if (now := self.landed()) != landed:
                quiet_since, landed = time.monotonic(), now

    def landed(self) -> int:
        """Writers go from front to back, but may leave holes for a moment; sampled."""
        return int(np.count_nonzero(self.bytes[:, 0])) * LAYOUT.bytes_per_block

    def say(self) -> list[str]:
        """All that the writer had to say, once it has ended."""
        said, _ = self.writer.communicate(timeout=PATIENCE_S)
        return said.split()

    def stop_writer(self) -> None:
        os.kill(self.writer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.writer.pid, os.WSTOPPED | os.WNOWAIT)

    def kill_writer(self) -> None:
        self.writer.kill()
        self.writer.wait(TIMEOUT_S)


def _num_unread(port: int) -> int:
    """What the kernel keeps for the connection to a port of ours that has most of it, in bytes."""
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [queues for _, local, _, _, queues, *_ in sockets if local.endswith(f":{port:04X}")]
    return max(int(queues.partition(":")[2], 16) for queues in ours)


@pytest.fixture
def target() -> Iterator[Target]:
    """Over TCP alone, in the middle of a write."""
    target = Target("tcp")
    with target.writer:
        target.admit()
        target.let_in_until(1)
        yield target
        target.writer.kill()


def test_bytes_of_a_killed_writer_land_as_long_as_its_agent_here_is_open(target: Target) -> None:
    """If this fails, fences need not close agents any more."""
    target.wait_for_bytes_on_the_way()
    target.kill_writer()
    landed = target.landed()
    target.let_in_all()
    assert landed < target.landed() < target.pool.num_bytes
    target.agent.close()


def test_nothing_of_a_killed_writer_lands_after_its_agent_here_is_closed(target: Target) -> None:
    target.wait_for_bytes_on_the_way()
    target.kill_writer()
    target.agent.close()
    target.bytes[:] = 0
    time.sleep(QUIET_S)
    assert not target.bytes.any()


def test_nothing_of_a_writer_that_wakes_up_lands_after_its_agent_here_is_closed(
    target: Target,
) -> None:
    target.stop_writer()
    target.agent.close()
    target.bytes[:] = 0
    target.writer.send_signal(signal.SIGCONT)
    assert target.say() == ["started", "BROKEN"]
    assert not target.bytes.any()


def test_nothing_lands_while_nobody_makes_progress(target: Target) -> None:
    """If this fails, a node need not look after peers that write."""
    landed = target.landed()
    time.sleep(QUIET_S)
    assert target.landed() == landed
    assert target.writer.poll() is None
    target.let_in_until_it_ends()
    assert target.say() == ["started", "DONE"]
    assert (target.bytes == 1).all()
    target.agent.close()


def test_a_writer_that_was_not_admitted_reaches_nothing() -> None:
    """It has all that NIXL asks for."""
    target = Target("tcp")
    with target.writer:
        target.admit(stranger=True)
        target.let_in_all()
        assert target.writer.poll() is None
        assert not target.bytes.any()
        target.writer.kill()
    target.agent.close()


def test_memory_of_one_host_is_copied_by_the_writer_itself() -> None:
    target = Target("all")
    with target.writer:
        try:
            target.admit()
            target.let_in_until_it_ends()  # whose connection we have to help with, at any moment
            assert target.say() == ["started", "DONE"]
        finally:
            target.writer.kill()
    assert (target.bytes == 1).all()
    target.agent.close()


# ---------------------------------------------------------------------- one process


@pytest.fixture
def pool() -> GatedPool:
    return make_pool(fill=3)


def test_a_network_device_that_is_not_there(pool: GatedPool) -> None:
    with pytest.raises(ConfigError, match=r"nixl_device: UCX cannot use .*nosuch.*devices: lo"):
        NixlAgent("a", pool, NixlConfig(device="nosuch", transports="tcp"))


def test_no_device_has_the_address() -> None:
    with pytest.raises(ConfigError, match=r"nixl_device: no network device has .*203\.0\.113\.7"):
        _ = NixlConfig(bind="203.0.113.7").engine_config


@pytest.mark.parametrize("value", ["", "lo,eth0", "lo=1"])
def test_settings_that_ucx_would_misread(value: str) -> None:
    with pytest.raises(ConfigError, match="nixl_device"):
        NixlConfig(device=value)
    with pytest.raises(ConfigError, match="nixl_transports"):
        NixlConfig(transports=value)


def test_loopback_unless_told_otherwise() -> None:
    assert NixlConfig().engine_config == "TLS=all,NET_DEVICES=lo"
    assert NixlConfig(device="all", transports="^sm").engine_config == "TLS=^sm"


def test_metadata_of_another_agent_are_refused(pool: GatedPool) -> None:
    a, b = (NixlAgent(name, pool, NixlConfig(transports="tcp")) for name in "ab")
    with pytest.raises(PeerRefused, match="of agent c are those of b'b'"):
        a.add("c", b.metadata())
    a.close()
    b.close()


def test_a_version_that_is_not_ours() -> None:
    with pytest.raises(PeerRefused, match=rf"d has NIXL 0\.9, this node {load_nixl().version}"):
        check_version("d", "0.9")


def test_a_device_that_nobody_knows() -> None:
    with pytest.raises(PeerRefused, match="nixl knows no device 'tpu:0'"):
        RemotePool.on("tpu:0", "a", 0, 0)


@pytest.mark.parametrize("limit", [1, 100, 512, 700, 5000, 1 << 20])
def test_parts_are_the_same_bytes(limit: int) -> None:
    rng = np.random.default_rng(limit)
    sizes = rng.integers(0, 1500, 20)
    theirs = np.cumsum(rng.integers(0, 9, 20) + sizes) - sizes
    extents = Extents(np.stack([theirs + 7, theirs, sizes], axis=1).astype(np.int64))
    cut = parts(extents, limit)
    assert all(0 < part[:, 2].sum() < 2 * limit for part in cut)
    moves = [(s + n, t + n) for s, t, size in extents.rows for n in range(size)]
    assert [(s + n, t + n) for part in cut for s, t, size in part for n in range(size)] == moves


@pytest.mark.gpu
def test_device_memory_is_written_to() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ours, theirs = (torch.full((33, 512), n, dtype=torch.uint8, device="cuda") for n in (1, 2))
    agents = []
    for name, memory in (("a", ours), ("b", theirs)):
        pool = replace(make_pool(), address=memory.data_ptr(), owner=memory, device="cuda:0")
        agents.append(NixlAgent(name, pool, NixlConfig()))
    a, b = agents
    a.add("b", b.metadata())
    remote = RemotePool.on("cuda:0", "b", theirs.data_ptr(), theirs.numel())
    transfer = a.start(remote, Extents.of_blocks([(1, 7), (2, 9)], 512).rows)
    while transfer.state is TransferState.RUNNING:
        transfer.poll()
        b.progress()
    assert transfer.state is TransferState.DONE
    assert theirs.sum().item() == 33 * 512 * 2 - 2 * 512
    a.close()
    b.close()
