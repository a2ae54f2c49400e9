"""Pools in memory that only a copier may touch: that of a GPU, for which host memory stands in."""

from __future__ import annotations

import ctypes
import dataclasses
import threading

import pytest

from kv_transfer import (
    BlockPoolMemory,
    Extents,
    MemoryHub,
    MemoryTransport,
    PeerRefused,
    Runs,
    ThreadDigester,
    WriteState,
)
from kv_transfer.digest import bytes_of, digest_of, pool_digest
from kv_transfer.transports.copy_thread import copy_extents
from kv_transfer.transports.nixl_agent import NixlConfig
from protocol import ConfigError, HandoffTicket
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, GatedPool, make_pool, make_random_pool

SIZE = LAYOUT.bytes_per_block
TICKET = HandoffTicket("t", 0)


class Copier:
    """Notes who calls it."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.num_copied = 0

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def read(self, address: int, runs: Runs) -> memoryview:
        return memoryview(b"".join(ctypes.string_at(address + at, size) for at, size in runs))

    def copy(self, extents: Extents, our_address: int, their_address: int) -> None:
        self.num_copied += 1
        copy_extents(extents, our_address, their_address)


def on_device(pool: GatedPool, copier: Copier, device: str = "cuda:0") -> BlockPoolMemory:
    return BlockPoolMemory(
        pool.layout, pool.address, pool.num_blocks, pool, device=device, copier=copier
    )


def never(*_: object) -> None:
    raise AssertionError("the host has copied memory of a device")


def test_a_digest_is_that_of_the_same_bytes_on_the_host() -> None:
    host = make_random_pool(seed=3)
    device = on_device(host, Copier())
    for runs in ([(700, 100), (3, 5), (700, 1)], [(SIZE, SIZE)], []):
        expected = digest_of(bytes_of(host), runs)
        assert pool_digest(device, runs) == pool_digest(host, runs) == expected


def test_digests_are_made_in_a_thread_that_knows_the_device() -> None:
    host, copier, told = make_random_pool(seed=3), Copier(), threading.Semaphore(0)
    digester = ThreadDigester(on_device(host, copier), told.release)
    digest = digester.start([[(SIZE, SIZE)], [(3 * SIZE, 10)]])
    assert told.acquire(timeout=TIMEOUT_S)
    digester.close()
    memory = bytes_of(host)
    assert digest.values == (digest_of(memory, [(SIZE, SIZE)]), digest_of(memory, [(1536, 10)]))
    assert copier.threads == ["kv-digest"]


def test_pools_of_one_device_are_copied_by_their_copier() -> None:
    hub, copier, done = MemoryHub(), Copier(), threading.Event()
    p, d = (MemoryTransport(hub, name, copy=never) for name in "pd")
    ours, theirs = make_random_pool(seed=1), make_pool()
    p.register(on_device(ours, copier), done.set)
    d.register(on_device(theirs, copier), lambda: None)
    p.connect(d.endpoint)
    assert p.peer_pool(d.endpoint).layout == LAYOUT
    d.open(TICKET, p.endpoint, [2, 5])
    write = p.write(d.endpoint, TICKET, Extents.of_blocks([(7, 2), (1, 5)], SIZE))
    assert done.wait(TIMEOUT_S)
    assert write.state is WriteState.DONE
    assert copier.num_copied == 1
    assert (theirs.bytes[[2, 5]] == ours.bytes[[7, 1]]).all()
    p.close()
    d.close()


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_pools_of_two_devices_are_not_copied_within_a_process(device: str) -> None:
    hub = MemoryHub()
    p, d = MemoryTransport(hub, "p"), MemoryTransport(hub, "d")
    p.register(on_device(make_pool(), Copier()), lambda: None)
    d.register(dataclasses.replace(make_pool(), device=device), lambda: None)
    with pytest.raises(PeerRefused, match=f"memory:d has its pool on {device}, not cuda:0"):
        p.peer_pool(d.endpoint)


@pytest.mark.parametrize("transports", ["tcp", "sm", "^cuda_ipc", "^cuda"])
def test_ucx_must_not_be_kept_from_reaching_the_device(transports: str) -> None:
    config = NixlConfig(transports=transports)
    with pytest.raises(ConfigError, match="cuda:0") as caught:
        config.check_reaches("cuda:0")
    assert caught.value.field == "nixl_transports"
    config.check_reaches("cpu")


@pytest.mark.parametrize("transports", ["all", "^sm", "^tcp"])
def test_ucx_reaches_a_device_by_what_is_left(transports: str) -> None:
    NixlConfig(transports=transports).check_reaches("cuda:0")
