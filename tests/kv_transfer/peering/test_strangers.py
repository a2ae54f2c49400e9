"""What comes in from outside the cluster, or from a node that is not as it should be."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import pytest

from kv_transfer import PeerRefused, PeerUnreachable
from kv_transfer.peering import ClusterToken, Medium, PeeringConfig, UnixMedium, handshake
from kv_transfer.peering.frames import frame
from kv_transfer.peering.handshake import (
    MAX_HANDSHAKE_BYTES,
    Challenge,
    Hello,
    Introduction,
    Refusal,
    Welcome,
    encode,
)
from protocol import ConfigError
from tests.kv_transfer.peering.conftest import MakeNode
from tests.kv_transfer.peering.nodes import (
    SECRET,
    TOKEN,
    Node,
    StrangeListener,
    Stranger,
    identity,
)

WRONG = ClusterToken("a guess")
ME = "shm:0123456789ab/stranger-1"
NONCE = bytes(32)


def refusal(message: bytes | None) -> str:
    """The reason in it."""
    assert message is not None
    version, body = msgspec.msgpack.decode(message)
    assert version == handshake.VERSION
    assert body["type"] == "refusal"
    return body["reason"]


def nobody_was_let_in(node: Node) -> bool:
    return node.network.is_stranger(ME) and not node.network.receive()


# ---------------------------------------------------------------------- dialling a node


def test_a_wrong_token_is_refused_on_both_sides(make_node: MakeNode) -> None:
    a, b = make_node("a", token=WRONG), make_node("b")
    a.network.send(b.endpoint, b"let me in")
    peer, error = a.lost()
    assert peer == b.endpoint
    assert isinstance(error, PeerRefused)
    assert "another cluster token" in str(error)
    b.network.connect(a.endpoint)
    assert isinstance(b.lost()[1], PeerRefused)
    assert a.network.is_stranger(b.endpoint)
    assert b.network.is_stranger(a.endpoint)
    assert b.network.receive() == []


def test_the_token_never_travels(make_node: MakeNode) -> None:
    node = make_node("a")
    seen = bytearray()

    class Listening(Stranger):
        def hear(self) -> bytes | None:
            message = super().hear()
            seen.extend(message or b"")
            return message

    with Listening.dial(node.endpoint) as stranger:
        stranger.shake_hands(handshake.dial(identity(ME), node.endpoint))
    assert len(seen) > 100
    assert SECRET.encode() not in seen
    assert SECRET not in repr(TOKEN) + repr(vars(node.network).get("_token"))


def test_an_empty_token_is_none() -> None:
    with pytest.raises(ConfigError, match="cluster_token: is empty"):
        ClusterToken("")


def test_another_version_is_refused(make_node: MakeNode) -> None:
    node = make_node("a")
    with Stranger.dial(node.endpoint) as stranger:
        hello = msgspec.msgpack.encode([7, {"type": "a hello of the future"}])
        stranger.say_framed(hello)
        assert refusal(stranger.hear()) == "the peer speaks version 7, this node version 1"
        assert stranger.hear() is None


def test_who_wants_another_node_is_told_that_it_is_gone(make_node: MakeNode) -> None:
    node = make_node("a")
    with (
        Stranger.dial(node.endpoint) as stranger,
        pytest.raises(PeerUnreachable, match="not shm:of-old") as caught,
    ):
        stranger.shake_hands(handshake.dial(identity(ME), "shm:of-old"))
    assert not isinstance(caught.value, PeerRefused)


@pytest.mark.parametrize("words", [0, 1], ids=["nothing", "hello"])
def test_who_says_nothing_more_is_dropped(make_node: MakeNode, words: int) -> None:
    node = make_node("a", config=PeeringConfig(handshake_timeout_s=0.2))
    with Stranger.dial(node.endpoint) as stranger:
        began = time.monotonic()
        if words:
            stranger.say_framed(encode(Hello(NONCE, ME, node.endpoint)))
        assert len(stranger.wait_for_end()) == words  # the challenge
        assert 0.1 < time.monotonic() - began < 5
    assert nobody_was_let_in(node)


def test_who_says_it_too_slowly_is_dropped(make_node: MakeNode) -> None:
    node = make_node("a", config=PeeringConfig(handshake_timeout_s=0.3))
    with Stranger.dial(node.endpoint) as stranger:
        stranger.socket.settimeout(0.02)
        began = time.monotonic()
        while time.monotonic() - began < 5:
            stranger.say(b"\0")
            try:
                if not stranger.socket.recv(1):
                    break
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: kvrelay\r\n\r\n",
        b"\xff\xff\xff\xff",
        frame(b""),
        frame(b"\xc1"),
        frame(b"\x92" * 10_000),
        frame(encode(Challenge(NONCE))),
        frame(encode(Refusal("no"))),
        frame(msgspec.msgpack.encode([1, {"type": "hello", "nonce": b"short"}])),
        (MAX_HANDSHAKE_BYTES + 1).to_bytes(4, "big"),
    ],
    ids=["http", "length", "empty", "no msgpack", "nested", "order", "refusal", "fields", "limit"],
)
def test_garbage_is_dropped(make_node: MakeNode, garbage: bytes) -> None:
    node = make_node("a")
    with Stranger.dial(node.endpoint) as stranger:
        stranger.say(garbage)
        stranger.wait_for_end()
    assert nobody_was_let_in(node)
    friend = make_node("b")
    friend.connected(node.endpoint)


def test_a_long_message_is_refused_before_it_is_kept(make_node: MakeNode) -> None:
    node = make_node("a")
    with Stranger.dial(node.endpoint) as stranger:
        stranger.shake_hands(handshake.dial(identity(ME), node.endpoint))
        stranger.say_framed(b"fine")
        assert node.received(1) == [b"fine"]
        limit = node.network.config.max_message_bytes
        stranger.say((limit + 1).to_bytes(4, "big"))  # and nothing behind it
        peer, error = node.lost()
        assert peer == ME
        assert f"{limit + 1} bytes was announced; at most {limit} are read" in str(error)


def test_what_was_said_once_proves_nothing_again(make_node: MakeNode) -> None:
    node = make_node("a")
    said = []

    class Recorded(Stranger):
        def say(self, data: bytes) -> None:
            said.append(data)
            super().say(data)

    with Recorded.dial(node.endpoint) as friend:
        friend.shake_hands(handshake.dial(identity(ME), node.endpoint))
        friend.say_framed(b"once")
        assert node.received(1) == [b"once"]
    node.lost()
    with Stranger.dial(node.endpoint) as stranger:
        stranger.say(b"".join(said))
        *_, last = stranger.wait_for_end()
        assert "another cluster token" in refusal(last)
    assert node.network.receive() == []


def test_a_passport_is_only_its_owners(make_node: MakeNode) -> None:
    node = make_node("a")
    with Stranger.dial(node.endpoint) as stranger:
        hello = encode(Hello(NONCE, ME, node.endpoint))
        stranger.say_framed(hello)
        challenge = stranger.hear()
        assert challenge is not None
        passport = msgspec.msgpack.encode(identity("shm:other").passport)
        proof = TOKEN.sign(b"dialler", hello, challenge, passport)
        stranger.say_framed(encode(Introduction(passport, proof)))
        assert refusal(stranger.hear()) == f"{ME} shows the passport of shm:other"


@pytest.mark.parametrize("change", ["truncated", "flipped", "too long", "never"])
def test_damaged_extras_are_refused(make_node: MakeNode, change: str) -> None:
    """Nobody gets to see them."""
    config = PeeringConfig(max_extra_bytes=1000, handshake_timeout_s=0.5)
    node = make_node("a", config=config)
    extra = bytes(1001 if change == "too long" else 1000)
    me = identity(ME, extra=extra)
    sent = {"truncated": extra[:-1], "flipped": b"\1" + extra[1:]}.get(change, extra)
    with Stranger.dial(node.endpoint) as stranger:
        steps = handshake.dial(me._replace(extra=b"" if change == "never" else sent), node.endpoint)
        if change == "never":
            with pytest.raises(EOFError):
                stranger.shake_hands(steps)
        else:
            with pytest.raises(PeerRefused, match="about its transport"):
                stranger.shake_hands(steps)
    assert nobody_was_let_in(node)


def test_silent_strangers_do_not_lock_others_out(make_node: MakeNode) -> None:
    node, friend = make_node("a", config=PeeringConfig(max_strangers=4)), make_node("b")
    strangers = [Stranger.dial(node.endpoint) for _ in range(20)]
    friend.connected(node.endpoint)
    assert "too many others" in refusal(strangers[0].hear())
    for stranger in strangers:
        stranger.socket.close()


def test_a_second_connection_takes_the_place_of_the_first(make_node: MakeNode) -> None:
    node = make_node("a")
    with Stranger.dial(node.endpoint) as first, Stranger.dial(node.endpoint) as second:
        first.shake_hands(handshake.dial(identity(ME), node.endpoint))
        first.say_framed(b"first")
        second.shake_hands(handshake.dial(identity(ME), node.endpoint))
        assert node.received(1) == [b"first"]
        assert "connected anew" in str(node.lost()[1])
        assert first.hear() is None
        second.say_framed(b"second")
        assert node.received(1) == [b"second"]


# ---------------------------------------------------------------------- being dialled by a node


def test_a_listener_of_another_version(
    make_node: MakeNode, make_medium: Callable[[], Medium]
) -> None:
    node = make_node("a")
    with StrangeListener(make_medium()) as listener:
        node.network.connect(listener.endpoint)
        with listener.accept() as stranger:
            stranger.say_framed(msgspec.msgpack.encode([3, ["whatever", "that says"]]))
            peer, error = node.lost()
    assert peer == listener.endpoint
    assert isinstance(error, PeerRefused)
    assert str(error) == f"{peer}: the peer speaks version 3, this node version 1"


def test_a_listener_that_does_not_know_the_token(
    make_node: MakeNode, make_medium: Callable[[], Medium]
) -> None:
    """It cannot check what it is shown, and says that all is well; the messages stay here."""
    node = make_node("a")
    with StrangeListener(make_medium()) as listener:
        node.network.send(listener.endpoint, b"confidential")
        with listener.accept() as stranger:
            stranger.hear()
            stranger.say_framed(encode(Challenge(NONCE)))
            stranger.hear()
            passport = msgspec.msgpack.encode(identity(listener.endpoint).passport)
            stranger.say_framed(encode(Welcome(passport, bytes(32))))
            _, error = node.lost()
            assert isinstance(error, PeerRefused)
            assert "another cluster token" in str(error)
            assert stranger.wait_for_end() == []


def test_a_listener_that_sends_back_what_it_hears(
    make_node: MakeNode, make_medium: Callable[[], Medium]
) -> None:
    node = make_node("a")
    with StrangeListener(make_medium()) as listener:
        node.network.connect(listener.endpoint)
        with listener.accept() as stranger:
            stranger.say_framed(stranger.hear() or b"")
            assert isinstance(node.lost()[1], PeerRefused)


def test_a_node_of_the_cluster_at_the_endpoint_of_another(
    make_node: MakeNode, make_medium: Callable[[], Medium]
) -> None:
    """Ports are used again; names are not."""
    node = make_node("a")
    with StrangeListener(make_medium()) as listener:
        node.network.connect(listener.endpoint)
        with listener.accept() as stranger:
            steps = handshake.listen(identity("shm:new"))
            next(steps)
            with pytest.raises(PeerRefused) as refused:
                steps.send(stranger.hear() or b"")
            stranger.say(handshake.refusal(refused.value))
            _, error = node.lost()
    assert not isinstance(error, PeerRefused)
    assert f"this is shm:new, not {listener.endpoint}" in str(error)


def test_a_listener_has_nothing_to_say_afterwards(
    make_node: MakeNode, make_medium: Callable[[], Medium]
) -> None:
    node = make_node("a")
    with StrangeListener(make_medium()) as listener:
        node.network.connect(listener.endpoint)
        with listener.accept() as stranger:
            stranger.shake_hands(handshake.listen(identity(listener.endpoint)))
            stranger.say_framed(b"by the way")
            assert isinstance(node.lost()[1], PeerRefused)
    assert node.network.receive() == []


# ---------------------------------------------------------------------- descriptors and users


@pytest.fixture
def unix_node(nothing_is_left: None) -> Node:
    return Node("a", UnixMedium("shm"))


def send_descriptors(stranger: Stranger, data: bytes, count: int) -> None:
    with open("/dev/null", "rb") as null:
        rights = array.array("i", [null.fileno()] * count)
        stranger.socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def test_descriptors_of_diallers_are_not_taken(unix_node: Node) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Stranger.dial(unix_node.endpoint) as stranger:
        steps = handshake.dial(identity(ME), unix_node.endpoint)
        send_descriptors(stranger, next(steps).data, 200)
        introduction = steps.send(stranger.hear() or b"").data
        send_descriptors(stranger, introduction, 200)
        with pytest.raises(StopIteration):
            steps.send(stranger.hear() or b"")
        send_descriptors(stranger, frame(b"and here are more"), 200)
        assert unix_node.received(1) == [b"and here are more"]
        assert len(os.listdir("/proc/self/fd")) <= before + 3  # a connection, a pidfd
    unix_node.network.close()


@pytest.mark.parametrize("count", [0, 1, 3, 16, 17, 200])
def test_descriptors_that_were_not_announced_are_closed(unix_node: Node, count: int) -> None:
    with StrangeListener(UnixMedium("shm")) as listener:
        unix_node.network.connect(listener.endpoint)
        with listener.accept() as stranger:
            steps = handshake.listen(identity(listener.endpoint, num_descriptors=2))
            next(steps)
            stranger.say(steps.send(stranger.hear() or b"").data)
            with pytest.raises(StopIteration) as end:
                steps.send(stranger.hear() or b"")
            welcome = end.value.value.welcome
            if count:
                send_descriptors(stranger, welcome, count)
            else:
                stranger.say(welcome)
            _, error = unix_node.lost()
    assert isinstance(error, PeerRefused)
    assert "descriptors" in str(error)
    unix_node.network.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_other_users_are_refused(unix_node: Node) -> None:
    program = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "dialled = socket.socket(socket.AF_UNIX)\n"
        "dialled.settimeout(10)\n"
        "dialled.connect(b'\\0kvrelay/' + sys.argv[1].encode())\n"
        "print(dialled.recv(1000)[4:])\n"
    )
    name = unix_node.endpoint.rpartition("/")[2]
    seen = subprocess.run(
        [sys.executable, "-c", program, name],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "the peer is a process of user 65534, this node of 0" in seen.stdout
    unix_node.network.close()
