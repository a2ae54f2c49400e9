from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kv_transfer import MemoryHub, MemoryTransport, PeerUnreachable
from kv_transfer.transports.memory import MAX_INBOX
from tests.kv_transfer.conformance_end import EndSpec, LocalEnd, Parts, usage
from tests.kv_transfer.pools import make_pool
from tests.kv_transfer.transport_conformance import TICKET, ExactFences, MakeEnd, blocks


def make_parts(hub: MemoryHub, spec: EndSpec) -> Parts:
    pool = make_pool(spec.num_blocks, spec.layout)
    return Parts(MemoryTransport(hub, spec.name, copy=pool.copy_extents), pool)


@pytest.fixture
def make_end() -> Iterator[MakeEnd[LocalEnd]]:
    hub, before, made = MemoryHub(), usage(), []

    def make(spec: EndSpec) -> LocalEnd:
        made.append(LocalEnd(lambda spec: make_parts(hub, spec), spec))
        return made[-1]

    yield make
    for end in made:
        end.close()
    after = usage()
    assert (after.threads, after.descriptors) == (before.threads, before.descriptors)


class TestMemoryTransport(ExactFences):
    @pytest.fixture
    def make_end(self, make_end: MakeEnd[LocalEnd]) -> MakeEnd[LocalEnd]:
        return make_end


def test_a_node_that_only_receives_has_no_thread(make_end: MakeEnd[LocalEnd]) -> None:
    p, d = make_end(EndSpec("p")), make_end(EndSpec("d"))
    before = set(threading.enumerate())
    d.open(TICKET, p.endpoint(), [1])
    p.notify(d.endpoint(), b"")
    assert set(threading.enumerate()) == before
    assert p.ended(p.write(d.endpoint(), TICKET, blocks((1, 1)))) == "DONE"
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"copy-p"}


def test_a_node_that_reads_no_message_is_lost(make_end: MakeEnd[LocalEnd]) -> None:
    p, d = make_end(EndSpec("p")), make_end(EndSpec("d"))
    p.notify_all(d.endpoint(), [b""] * MAX_INBOX)
    with pytest.raises(PeerUnreachable, match=f"memory:d has {MAX_INBOX} messages unread"):
        p.notify(d.endpoint(), b"")
    assert len(d.receive()) == MAX_INBOX
    p.notify(d.endpoint(), b"read again")
    assert [received.data for received in d.receive()] == [b"read again"]
