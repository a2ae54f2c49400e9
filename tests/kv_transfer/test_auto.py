from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer import AutoTransport, MemoryHub, MemoryTransport, PeerUnreachable
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.shm import ShmTransport
from protocol import HandoffTicket
from tests.kv_transfer.conformance_end import EndSpec, LocalEnd, Parts
from tests.kv_transfer.shm_end import TOKEN, make_shared_pool
from tests.kv_transfer.transport_conformance import TICKET, MakeEnd, ProcessConformance, blocks


class TestAutoTransport(ProcessConformance):
    factory = "tests.kv_transfer.auto_end:make_parts"


def make_near_and_far(hub: MemoryHub, spec: EndSpec) -> Parts:
    """shm, and something else that leads to those who have no shm."""
    pool = make_shared_pool(spec)
    near, far = ShmTransport(spec.name, TOKEN), MemoryTransport(hub, spec.name)
    return Parts(AutoTransport([near, far]), pool)


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
def make_end(hub: MemoryHub) -> Iterator[MakeEnd[LocalEnd]]:
    made: list[LocalEnd] = []

    def make(spec: EndSpec) -> LocalEnd:
        made.append(LocalEnd(lambda spec: make_near_and_far(hub, spec), spec))
        return made[-1]

    yield make
    for end in made:
        end.close()


def test_each_peer_is_reached_by_the_first_transport_that_leads_there(
    hub: MemoryHub, make_end: MakeEnd[LocalEnd]
) -> None:
    p, d = make_end(EndSpec("p", seed=1)), make_end(EndSpec("d"))
    near, far = d.endpoint().split("+")
    assert near.startswith("shm:")
    assert far == "memory:d"
    assert p.resolve(d.endpoint()) == near
    elsewhere = f"shm:00ff/d-1+{far}"  # shm, but on another host
    assert p.resolve(elsewhere) == far
    assert p.resolve(far) == far


def test_nothing_in_common_leads_nowhere(make_end: MakeEnd[LocalEnd]) -> None:
    p = make_end(EndSpec("p"))
    with pytest.raises(PeerUnreachable, match=r"nixl:1\.2\.3\.4:5/d-1 offers none of shm, memory"):
        p.resolve("nixl:1.2.3.4:5/d-1")
    with pytest.raises(PeerUnreachable, match="shm:00ff/d-1 is on another host"):
        p.resolve("shm:00ff/d-1")


def test_a_ticket_is_fenced_by_the_transport_that_it_was_opened_on(
    make_end: MakeEnd[LocalEnd],
) -> None:
    p, d = make_end(EndSpec("p", seed=1)), make_end(EndSpec("d"))
    near, far = d.endpoint().split("+")
    p_near, p_far = p.endpoint().split("+")
    other = HandoffTicket("other", 0)
    p.connected(near)
    d.connected(p_near)
    d.open(TICKET, p_near, [1])
    d.open(other, p_far, [2])
    assert p.ended(p.write(near, TICKET, blocks((1, 1)))) == "DONE"
    assert p.ended(p.write(far, other, blocks((2, 2)))) == "DONE"
    assert not d.fence(TICKET)  # only p's word, or its end, proves that
    assert d.fence(other)  # exact
    assert d.fence(HandoffTicket("never", 0))


def test_a_remote_host_is_reached_by_nixl() -> None:
    spec = EndSpec("p")
    parts = make_shared_pool(spec)
    transport = AutoTransport([ShmTransport("p", TOKEN), NixlTransport("p", TOKEN)])
    transport.register(parts, lambda: None)
    assert transport.resolve("shm:00ff/d-1+nixl:127.0.0.1:9/d-1") == "nixl:127.0.0.1:9/d-1"
    transport.close()
