from __future__ import annotations

import threading

import pytest

from kv_transfer import MemoryHub, MemoryTransport, PeerUnreachable, WriteState
from kv_transfer.transports.memory import MAX_INBOX
from tests.kv_transfer.pools import make_pool
from tests.kv_transfer.transport_conformance import (
    TICKET,
    End,
    MakeTransport,
    TransportConformance,
)


class TestMemoryTransport(TransportConformance):
    @pytest.fixture
    def make_transport(self) -> MakeTransport:
        hub = MemoryHub()
        return lambda name: MemoryTransport(hub, name)


def test_checksums_can_be_left_out() -> None:
    hub = MemoryHub()
    p = End(MemoryTransport(hub, "p", checksums=False), make_pool(fill=1))
    d = End(MemoryTransport(hub, "d"), make_pool())
    d.transport.open(TICKET, [1, 2])
    write = p.write(d, TICKET, [(1, 1), (2, 2)])
    assert p.ended(write) is WriteState.DONE
    assert list(write.checksums) == []
    assert (d.pool.bytes[1:3] == 1).all()
    p.transport.close()


def test_a_node_that_only_receives_has_no_thread() -> None:
    hub = MemoryHub()
    p, d = (End(MemoryTransport(hub, name), make_pool()) for name in "pd")
    before = set(threading.enumerate())
    d.transport.open(TICKET, [1])
    p.transport.notify(d.endpoint, b"")
    assert set(threading.enumerate()) == before
    assert p.ended(p.write(d, TICKET, [(1, 1)])) is WriteState.DONE
    assert {t.name for t in set(threading.enumerate()) - before} == {"copy-p"}
    p.transport.close()
    assert set(threading.enumerate()) == before


def test_a_node_that_reads_no_message_is_lost() -> None:
    hub = MemoryHub()
    p, d = (End(MemoryTransport(hub, name), make_pool()) for name in "pd")
    for _ in range(MAX_INBOX):
        p.transport.notify(d.endpoint, b"")
    with pytest.raises(PeerUnreachable, match=f"memory:d has {MAX_INBOX} messages unread"):
        p.transport.notify(d.endpoint, b"")
    assert len(d.transport.receive()) == MAX_INBOX
    p.transport.notify(d.endpoint, b"read again")
    assert list(d.transport.receive()) == [b"read again"]
