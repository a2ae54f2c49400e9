"""The handshake without sockets: what each side says to whatever it is told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import PeerRefused, PeerUnreachable
from kv_transfer.peering import ClusterToken, handshake
from kv_transfer.peering.frames import Frames
from kv_transfer.peering.handshake import Handshake, Identity, Met
from tests.kv_transfer.peering.nodes import POOL, identity

DIALLER, LISTENER = "shm:here/dialler", "shm:here/listener"


def messages_in(data: bytes) -> list[bytes]:
    frames, messages = Frames(1 << 20), []
    frames.add(data)
    while (message := frames.next()) is not None:
        messages.append(message)
    return messages


class Side:
    """One generator, and what it has said but nobody has heard."""

    def __init__(self, steps: Handshake) -> None:
        self._steps = steps
        self.said = messages_in(next(steps).data)
        self.met: Met | None = None

    def hear(self, message: bytes) -> None:
        try:
            self.said += messages_in(self._steps.send(message).data)
        except StopIteration as end:
            self.met = end.value
            self.said += messages_in(end.value.welcome)


def shake_hands(dialler: Identity, listener: Identity, wanted: str = LISTENER) -> tuple[Met, Met]:
    a, b = Side(handshake.dial(dialler, wanted)), Side(handshake.listen(listener))
    while a.said or b.said:
        here, there = (a, b) if a.said else (b, a)
        there.hear(here.said.pop(0))
    assert a.met is not None
    assert b.met is not None
    return a.met, b.met


@pytest.mark.parametrize("extra", [b"", b"extra" * 1000])
@pytest.mark.parametrize("other_extra", [b"", b"other"])
def test_each_learns_the_others_passport(extra: bytes, other_extra: bytes) -> None:
    me, you = identity(DIALLER, extra=extra), identity(LISTENER, extra=other_extra)
    seen, shown = shake_hands(me, you)
    assert seen[:2] == (you.passport, other_extra)
    assert shown[:2] == (me.passport, extra)


def test_no_two_handshakes_are_alike() -> None:
    hellos = {next(handshake.dial(identity(DIALLER), LISTENER)).data for _ in range(10)}
    assert len(hellos) == 10


def test_tokens_must_agree() -> None:
    with pytest.raises(PeerRefused, match="another cluster token"):
        shake_hands(identity(DIALLER, token=ClusterToken("other")), identity(LISTENER))


def test_the_listener_must_be_the_one_that_is_wanted() -> None:
    with pytest.raises(PeerUnreachable, match="this is shm:here/other, not shm:here/listener"):
        shake_hands(identity(DIALLER), identity("shm:here/other"))


def recorded(listener: str, extra: bytes = b"extra") -> list[bytes]:
    """What a listener hears."""
    a = Side(handshake.dial(identity(DIALLER, extra=extra), listener))
    b = Side(handshake.listen(identity(listener)))
    heard = []
    while a.said:
        heard.append(a.said.pop(0))
        b.hear(heard[-1])
        while b.said and a.met is None:
            a.hear(b.said.pop(0))
    assert b.met is not None
    return heard


def flip_a_bit(message: bytes, data: st.DataObject) -> bytes:
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    flipped = bytearray(message)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def speak_until_refused(a: Side, b: Side, speaker: Side, number: int, data: st.DataObject) -> None:
    """One bit of what one side says, in its message of this number, is changed on its way."""
    count = 0
    while a.said or b.said:
        here, there = (a, b) if a.said else (b, a)
        message = here.said.pop(0)
        if here is speaker:
            message = flip_a_bit(message, data) if count == number else message
            count += 1
        there.hear(message)


@settings(deadline=None)
@given(data=st.data(), number=st.integers(0, 2), dialler_speaks=st.booleans())
def test_whatever_is_changed_is_noticed(
    data: st.DataObject, number: int, dialler_speaks: bool
) -> None:
    a = Side(handshake.dial(identity(DIALLER, extra=b"extra"), LISTENER))
    b = Side(handshake.listen(identity(LISTENER, extra=b"extra")))
    with pytest.raises(PeerUnreachable):
        speak_until_refused(a, b, a if dialler_speaks else b, number, data)


def hear_all(steps: Handshake, noise: list[bytes]) -> None:
    next(steps)
    for message in noise:
        steps.send(message)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_noise_is_refused(noise: list[bytes]) -> None:
    with pytest.raises(PeerUnreachable):
        hear_all(handshake.listen(identity(LISTENER)), noise)
    with pytest.raises(PeerUnreachable):
        hear_all(handshake.dial(identity(DIALLER), LISTENER), noise)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None)
@given(kind=st.sampled_from(["hello", "introduction", "refusal", "welcome", 1]), rest=json_like)
def test_messages_of_wrong_types_are_refused(kind: object, rest: object) -> None:
    fields = rest if isinstance(rest, dict) else {"nonce": rest, "sender": rest, "wanted": rest}
    message = msgspec.msgpack.encode([handshake.VERSION, {"type": kind, **fields}])
    steps = handshake.listen(identity(LISTENER))
    next(steps)
    with pytest.raises(PeerUnreachable):
        steps.send(message)


def test_what_is_shown_is_what_the_pool_is() -> None:
    seen, _ = shake_hands(identity(DIALLER), identity(LISTENER))
    assert seen.passport.pool == POOL
