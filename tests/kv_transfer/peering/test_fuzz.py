"""Bytes of all kinds thrown at listening sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.peering import Medium, PeeringConfig, handshake
from kv_transfer.peering.frames import frame
from tests.kv_transfer.conformance_end import usage
from tests.kv_transfer.peering.nodes import TOKEN, Node, Stranger, identity
from tests.kv_transfer.peering.test_handshake import DIALLER, recorded

LIMITS = PeeringConfig(handshake_timeout_s=2.0, max_strangers=8)
_MAX_GROWTH_BYTES = 32 << 20


class Spoken(NamedTuple):
    """Messages of another handshake with the same node, in some order, and maybe a byte changed."""

    order: list[int]
    flip: int | None

    def said_to(self, endpoint: str) -> bytes:
        messages = recorded(endpoint)
        data = bytearray(b"".join(frame(messages[n]) for n in self.order))
        if data and self.flip is not None:
            data[self.flip % len(data)] ^= 1 + self.flip % 255
        return bytes(data)


noise = st.binary(max_size=2000)
lengths = st.integers(0, 2**32 - 1).map(lambda length: length.to_bytes(4, "big"))
framed = noise.map(frame)
spoken = st.builds(
    Spoken, st.lists(st.integers(0, 2), max_size=6), st.none() | st.integers(0, 10_000)
)


@pytest.fixture
def node(nothing_is_left: None, make_medium: Callable[[], Medium]) -> Iterator[Node]:
    node = Node("target", make_medium(), config=LIMITS)
    yield node
    node.network.close()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=st.lists(noise | lengths | framed | spoken, max_size=6), hang_up=st.booleans())
def test_no_bytes_get_in(node: Node, said: list[bytes | Spoken], hang_up: bool) -> None:
    with Stranger.dial(node.endpoint) as stranger:
        for chunk in said:
            stranger.say(chunk.said_to(node.endpoint) if isinstance(chunk, Spoken) else chunk)
        if not hang_up:
            stranger.say_no_more()
            stranger.wait_for_end()
    assert node.network.receive() == []
    assert node.network.lost_peers() == []
    assert node.network.is_stranger(DIALLER)


def test_it_lets_friends_in_all_the_while(
    nothing_is_left: None, make_medium: Callable[[], Medium]
) -> None:
    """Neither memory nor descriptors grow with the number of strangers."""
    node = Node("target", make_medium(), config=LIMITS)
    friend = Node("friend", make_medium())
    friend.connected(node.endpoint)
    process = psutil.Process()
    before, memory = usage(), process.memory_info().rss
    for n in range(300):
        with Stranger.dial(node.endpoint) as stranger:
            stranger.say((0xFFFFFFFF if n % 2 else 10_000).to_bytes(4, "big") + bytes(9_000))
            if n % 3 == 0:
                friend.network.send(node.endpoint, b"%d" % n)
                assert node.received(1) == [b"%d" % n]
    assert process.memory_info().rss - memory < _MAX_GROWTH_BYTES
    with Stranger.dial(node.endpoint) as stranger:
        stranger.shake_hands(handshake.dial(identity("shm:x/last", token=TOKEN), node.endpoint))
    node.until(node.network.lost_peers)
    node.network.forget("shm:x/last")
    assert usage() == before
    friend.network.close()
    node.network.close()
