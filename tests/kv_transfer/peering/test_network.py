"""What nodes of one cluster do with each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from kv_transfer import PeerRefused, PeerUnreachable
from kv_transfer.peering import (
    Medium,
    PeeringConfig,
    PeerNetwork,
    ProcessIdentity,
    UnixMedium,
    handshake,
)
from tests.kv_transfer.peering.conftest import MakeNode
from tests.kv_transfer.peering.nodes import (
    MEDIA,
    POOL,
    TOKEN,
    Node,
    StrangeListener,
    identity,
)
from tests.kv_transfer.pools import TIMEOUT_S

QUICK = PeeringConfig(connect_timeout_s=0.2, handshake_timeout_s=0.2, retry_after_s=0.05)


def test_both_learn_who_the_other_is(make_node: MakeNode) -> None:
    a, b = make_node("a", extra=b"of a"), make_node("b", extra=b"of b" * 10_000)
    passport = a.connected(b.endpoint)
    assert passport.endpoint == b.endpoint
    assert passport.pool == POOL
    assert passport.process == ProcessIdentity.own()
    assert a.network.extra(b.endpoint) == b"of b" * 10_000
    seen = b.until(lambda: b.network.met(a.endpoint))
    assert seen is not None
    assert seen.endpoint == a.endpoint
    assert b.network.passport(a.endpoint) is None  # b has not dialled
    b.connected(a.endpoint)
    assert b.network.extra(a.endpoint) == b"of a"


def test_descriptors_go_to_who_dials(nothing_is_left: None) -> None:
    memory = os.memfd_create("given")
    os.write(memory, b"hello")
    b = Node("b", UnixMedium("shm"), descriptors=[memory])
    a = Node("a", UnixMedium("shm"))
    a.connected(b.endpoint)
    (taken,) = a.network.take_descriptors(b.endpoint)
    assert os.pread(taken, 5, 0) == b"hello"
    assert not os.get_inheritable(taken)
    assert a.network.take_descriptors(b.endpoint) == ()
    b.connected(a.endpoint)
    assert b.network.take_descriptors(a.endpoint) == ()
    a.network.close()
    assert os.pread(taken, 5, 0) == b"hello"  # ours, whatever becomes of the node
    os.close(taken)
    b.network.close()
    os.close(memory)


def test_descriptors_that_nobody_takes_are_closed(nothing_is_left: None) -> None:
    memory = os.memfd_create("given")
    a = Node("a", UnixMedium("shm"))
    for _ in range(3):
        b = Node("b", UnixMedium("shm"), descriptors=[memory])
        a.connected(b.endpoint)
        b.network.close()
        a.lost()
    before = len(os.listdir("/proc/self/fd"))
    assert before < 40
    a.network.close()
    os.close(memory)


def test_a_peer_may_be_dialled_before_it_starts(
    nothing_is_left: None, make_medium: Callable[[], Medium]
) -> None:
    b = PeerNetwork("b", make_medium(), TOKEN)
    a = Node("a", make_medium())
    a.network.send(b.endpoint, b"early")
    activity = threading.Event()
    b.start(POOL, activity.set)
    a.connected(b.endpoint)
    a.network.close()
    while not (received := b.receive()):
        assert activity.wait(TIMEOUT_S)
        activity.clear()
    assert [message.data for message in received] == [b"early"]
    b.close()


def test_a_network_that_never_started_closes(
    nothing_is_left: None, make_medium: Callable[[], Medium]
) -> None:
    PeerNetwork("b", make_medium(), TOKEN).close()


def test_after_close_nobody_is_reached(make_node: MakeNode) -> None:
    a, b = make_node("a"), make_node("b")
    a.connected(b.endpoint)
    a.network.close()
    a.network.close()
    a.network.connect(b.endpoint)
    with pytest.raises(PeerUnreachable, match="closed"):
        a.network.send(b.endpoint, b"")


def test_what_has_come_is_there_after_close(make_node: MakeNode) -> None:
    a, b = make_node("a"), make_node("b", config=PeeringConfig(max_inbox_messages=2))
    for n in range(5):
        a.network.send(b.endpoint, b"%d" % n)
    b.until(lambda: b.network.met(a.endpoint))
    a.connected(b.endpoint)
    a.network.close()
    b.network.close()
    assert len(b.network.receive()) <= 2
    assert b.network.receive() == []
    b.network.lost_peers()
    b.network.connect(a.endpoint)
    b.network.forget(a.endpoint)
    assert not b.network.has_exited(a.endpoint)


def test_closing_while_peers_come(make_node: MakeNode) -> None:
    a = make_node("a")
    for _ in range(20):
        b = make_node("b")
        a.network.connect(b.endpoint)
        b.network.close()
        a.lost()


def send_without_end(a: Node, b: Node, sent: list[bytes]) -> None:
    while len(sent) < 1000:
        message = len(sent).to_bytes(4, "big") * 25_000
        a.network.send(b.endpoint, message)
        sent.append(message)


def test_senders_wait_for_a_node_that_reads_nothing(make_node: MakeNode) -> None:
    """And nothing is lost, and nobody keeps more than allowed."""
    limits = PeeringConfig(max_inbox_messages=10, max_outgoing_bytes=300_000)
    a, b = make_node("a", config=limits), make_node("b", config=limits)
    a.connected(b.endpoint)
    sent: list[bytes] = []
    with pytest.raises(PeerUnreachable, match=r"unread; at most 300000 may wait"):
        send_without_end(a, b, sent)
    first = b.network.receive()
    assert len(first) <= 10
    seen = [received.data for received in first]
    while not seen or seen[-1] != sent[-1]:
        seen += b.received(1)
    assert seen == sent
    a.network.send(b.endpoint, b"again")
    assert b.received(1) == [b"again"]


def test_an_inbox_counts_bytes_too(make_node: MakeNode) -> None:
    b = make_node("b", config=PeeringConfig(max_inbox_bytes=100_000))
    a = make_node("a")
    for _ in range(30):
        a.network.send(b.endpoint, bytes(50_000))
    a.network.send(b.endpoint, b"end")
    b.until(lambda: b.network.met(a.endpoint))
    seen: list[bytes] = []
    while not seen or seen[-1] != b"end":
        batch = b.received(1)
        assert sum(map(len, batch)) < 200_000
        seen += batch
    assert len(seen) == 31


def test_a_loss_is_told_after_the_last_words(make_node: MakeNode) -> None:
    a, b = make_node("a"), make_node("b", config=PeeringConfig(max_inbox_messages=4))
    for n in range(100):
        a.network.send(b.endpoint, b"%d" % n)
    a.connected(b.endpoint)
    a.network.close()
    seen: list[bytes] = []

    def lost() -> bool:
        losses = b.network.lost_peers()
        if losses:
            assert len(seen) == 100
        seen.extend(received.data for received in b.network.receive())
        return bool(losses)

    b.until(lost)
    assert seen == [b"%d" % n for n in range(100)]


def test_a_failed_peer_is_left_alone_for_a_while(
    make_node: MakeNode, make_medium: Callable[[], Medium]
) -> None:
    a = make_node("a", config=PeeringConfig(retry_after_s=0.3))
    with StrangeListener(make_medium()) as listener:
        a.network.connect(listener.endpoint)
        with listener.accept():
            pass
        peer, error = a.lost()
        failed = time.monotonic()
        assert peer == listener.endpoint
        assert isinstance(error, PeerUnreachable)
        for _ in range(3):
            a.network.connect(listener.endpoint)
            with pytest.raises(PeerUnreachable, match=r"closed|broken"):
                a.network.passport(listener.endpoint)
            with pytest.raises(PeerUnreachable, match=r"closed|broken"):
                a.network.send(listener.endpoint, b"")
        time.sleep(max(0.0, failed + 0.4 - time.monotonic()))
        with pytest.raises(PeerUnreachable):  # nobody has called connect
            a.network.passport(listener.endpoint)
        a.network.connect(listener.endpoint)
        assert a.network.passport(listener.endpoint) is None
        with listener.accept() as accepted:
            accepted.shake_hands(handshake.listen(identity(listener.endpoint)))
            assert a.until(lambda: a.network.passport(listener.endpoint))


def test_who_takes_no_more_peers_says_so(make_node: MakeNode) -> None:
    b = make_node("b", config=PeeringConfig(max_peers=1))
    a, c = make_node("a"), make_node("c")
    a.connected(b.endpoint)
    c.network.connect(b.endpoint)
    _, error = c.lost()
    assert isinstance(error, PeerRefused)
    assert "there are 1 peers already" in str(error)
    with pytest.raises(PeerRefused, match="there are 1 peers already"):
        b.network.send(c.endpoint, b"")
    with pytest.raises(PeerRefused, match="there are 1 peers already"):
        b.network.passport(c.endpoint)
    b.network.send(a.endpoint, b"fine")
    assert a.received(1) == [b"fine"]


def test_lost_peers_make_room(make_node: MakeNode) -> None:
    a = make_node("a", config=PeeringConfig(max_peers=3))
    for n in range(10):
        endpoint = f"{a.endpoint}{n}"  # of nobody
        a.network.connect(endpoint)
        a.lost()
        assert a.network.is_stranger(endpoint)


def test_strangers_peers_and_the_lost(make_node: MakeNode) -> None:
    a, b = make_node("a"), make_node("b")
    assert a.network.is_stranger(b.endpoint)
    a.network.connect(b.endpoint)
    assert not a.network.is_stranger(b.endpoint)
    a.connected(b.endpoint)
    b.until(lambda: not b.network.is_stranger(a.endpoint))
    b.network.close()
    a.lost()
    assert not a.network.is_stranger(b.endpoint)
    assert not a.network.has_exited(b.endpoint)  # it is this process
    a.network.forget(b.endpoint)
    assert a.network.is_stranger(b.endpoint)


def test_other_programs_inherit_nothing(make_node: MakeNode) -> None:
    before = set(os.listdir("/proc/self/fd"))
    a, b = make_node("a"), make_node("b")
    a.connected(b.endpoint)
    b.connected(a.endpoint)
    made = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before]
    inherited = [fd for fd in made if is_open(fd) and os.get_inheritable(fd)]
    assert len(made) > 8
    assert inherited == []


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_many_nodes_at_once(make_node: MakeNode) -> None:
    nodes = [make_node(f"n{n}") for n in range(6)]
    for sender in nodes:
        for receiver in nodes:
            for n in range(20):
                if sender is not receiver:
                    sender.network.send(receiver.endpoint, f"{sender.endpoint} {n}".encode())
    for receiver in nodes:
        messages = receiver.received(100)
        for sender in nodes:
            mine = [m for m in messages if m.startswith(sender.endpoint.encode())]
            expected = 0 if sender is receiver else 20
            assert mine == [f"{sender.endpoint} {n}".encode() for n in range(expected)]


@pytest.mark.parametrize(
    ("kind", "endpoint", "problem"),
    [
        ("unix", "shm:0123456789ab/d-1", "on another host: its id is 0123456789ab, ours"),
        ("unix", "nixl:127.0.0.1:1/d-1", "is not an endpoint of shm"),
        ("unix", "shm:0123456789ab/../d", "is not an endpoint of shm"),
        ("tcp", "shm:0123456789ab/d-1", "is not an endpoint of nixl"),
        ("tcp", "nixl:localhost:1/d-1", "is not an endpoint of nixl"),
        ("tcp", "nixl:127.0.0.1:/d-1", "is not an endpoint of nixl"),
        ("tcp", "nixl:127.0.0.1:99999999/d-1", "is not an endpoint of nixl"),
        ("tcp", "nixl:::1" * 100, "is not an endpoint of nixl"),
    ],
)
def test_endpoints_that_lead_nowhere(kind: str, endpoint: str, problem: str) -> None:
    node = Node("a", MEDIA[kind]())
    with pytest.raises(PeerUnreachable, match=problem):
        node.network.check(endpoint)
    node.network.connect(endpoint)
    assert problem in str(node.lost()[1])
    node.network.close()


def test_who_does_not_answer_is_given_up(
    make_node: MakeNode, make_medium: Callable[[], Medium]
) -> None:
    a = make_node("a", config=QUICK)
    with StrangeListener(make_medium()) as listener:
        a.network.connect(listener.endpoint)
        _, error = a.lost()
        assert "did not say who it is within 0.2 s" in str(error)
        assert listener.endpoint in str(error)
