from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer import Extents, PeerRefused, PeerUnreachable
from kv_transfer.peering import PeerNetwork, UnixMedium
from kv_transfer.transports import shm
from kv_transfer.transports.copy_thread import copy_extents
from kv_transfer.transports.shm import ShmTransport
from protocol import HandoffTicket
from tests.kv_transfer.conformance_end import EndSpec, LocalEnd, usage
from tests.kv_transfer.pools import make_pool
from tests.kv_transfer.shm_end import TOKEN, make_parts
from tests.kv_transfer.transport_conformance import (
    TICKET,
    UNTOUCHED,
    MakeEnd,
    ProcessConformance,
    blocks,
)


class TestShmTransport(ProcessConformance):
    factory = "tests.kv_transfer.shm_end:make_parts"


@pytest.fixture
def make_end() -> Iterator[MakeEnd[LocalEnd]]:
    """Both ends in this process."""
    before, made = usage(), []

    def make(spec: EndSpec) -> LocalEnd:
        made.append(LocalEnd(make_parts, spec))
        return made[-1]

    yield make
    while made:
        made.pop().close()
    assert usage() == before
    assert mappings() == 0


def mappings() -> int:
    """Of shared memory, in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvrelay")


def test_nodes_of_other_hosts_are_out_of_reach(make_end: MakeEnd[LocalEnd]) -> None:
    end = make_end(EndSpec("p"))
    with pytest.raises(PeerUnreachable, match="shm:00ff/d-1 is on another host: its id is 00ff"):
        end.resolve("shm:00ff/d-1")


def test_the_memory_of_a_lost_peer_is_let_go(make_end: MakeEnd[LocalEnd]) -> None:
    p = make_end(EndSpec("p"))
    d = LocalEnd(make_parts, EndSpec("d"))
    assert mappings() == 2
    p.connected(d.endpoint())
    assert mappings() == 3
    assert p.ended(p.write(d.endpoint(), TICKET, blocks((1, 1)))) == "DONE"
    d.close()
    p.lost()
    assert mappings() == 2  # each its own
    del d
    assert mappings() == 1


def test_the_memory_stays_while_a_copy_is_under_way(make_end: MakeEnd[LocalEnd]) -> None:
    p, d = make_end(EndSpec("p", seed=1)), make_end(EndSpec("d", fill=UNTOUCHED))
    p.connected(d.endpoint())
    p.hold(2)
    write = p.write(d.endpoint(), TICKET, blocks((1, 1), (2, 2)))
    p.held(2)
    d.close()
    p.lost()
    p.release(2)
    assert p.ended(write) == "FAILED"


@pytest.mark.parametrize("memory", ["none", "short", "file"])
def test_a_peer_without_proper_memory_is_refused(
    make_end: MakeEnd[LocalEnd], tmp_path: Path, memory: str
) -> None:
    p = make_end(EndSpec("p"))
    pool = make_pool()
    (tmp_path / "pool").write_bytes(bytes(pool.num_bytes))
    descriptors = []
    if memory == "short":
        descriptors.append(os.memfd_create("short", os.MFD_ALLOW_SEALING))
    elif memory == "file":
        descriptors.append(os.open(tmp_path / "pool", os.O_RDWR))
    d = PeerNetwork("d", UnixMedium("shm"), TOKEN)
    d.start(pool.shape, lambda: None, descriptors=descriptors)
    for _ in range(2):
        with pytest.raises(PeerRefused, match="memor"):
            p.connected(d.endpoint)
    assert p.ended(p.write(d.endpoint, TICKET, blocks((1, 1)))) == "FAILED"
    d.close()
    for fd in descriptors:
        os.close(fd)


def test_a_fence_is_no_proof_once_tickets_were_forgotten(
    make_end: MakeEnd[LocalEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "MAX_TICKETS", 3)
    p, d = make_end(EndSpec("p")), make_end(EndSpec("d"))
    p.connected(d.endpoint())
    d.connected(p.endpoint())
    tickets = [HandoffTicket(f"r{n}", 0) for n in range(4)]
    assert d.fence(tickets[0])
    for ticket in tickets:
        d.open(ticket, p.endpoint(), [1])
        assert not d.fence(ticket)
    assert not d.fence(tickets[0])
    assert not d.fence(HandoffTicket("unknown", 0))


@pytest.mark.parametrize("copied_at_once", [1, 100, 4 << 20, 5 << 20])
def test_copies_of_all_lengths(copied_at_once: int) -> None:
    """Short and long ones go different ways."""
    size = 5 << 20
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    target = np.zeros(2 * size, np.uint8)
    first, rest = copied_at_once, size - copied_at_once
    rows = np.array([[0, 7, first], [first, size + first, rest]], dtype=np.int64)
    copy_extents(Extents(rows), source.ctypes.data, target.ctypes.data)
    expected = np.zeros(2 * size, np.uint8)
    expected[7 : 7 + first] = source[:first]
    expected[size + first :] = source[first:]
    assert (target == expected).all()


def test_a_pool_must_be_in_shared_memory() -> None:
    transport = ShmTransport("p", TOKEN)
    with pytest.raises(AssertionError, match="not in shared memory"):
        transport.register(make_pool(), lambda: None)
    transport.close()
