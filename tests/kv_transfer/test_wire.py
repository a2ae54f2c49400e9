from __future__ import annotations

import contextlib
import re
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_transfer import BadMessage, Reason
from kv_transfer.wire import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Arrived,
    Cancel,
    Closed,
    Commit,
    Destination,
    Heartbeat,
    Message,
    PrefillStarted,
    Pushing,
    Revoke,
    Revoked,
    decode,
    encode,
)
from protocol import HandoffTicket

uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
block_ids = st.integers(1, 2**32 - 1)
reservations = st.integers(1, 2**32 - 1)
tickets = st.builds(HandoffTicket, st.text(max_size=40), uint32)
reasons = st.sampled_from(Reason)
messages = st.one_of(
    st.builds(PrefillStarted, tickets),
    st.builds(Destination, tickets, reservations, uint32, st.lists(block_ids).map(tuple)),
    st.builds(Pushing, tickets),
    st.builds(Heartbeat, tickets),
    st.builds(Commit, tickets, uint32, st.lists(uint32).map(tuple), st.lists(uint64).map(tuple)),
    st.builds(Arrived, tickets),
    st.builds(Closed, tickets, reasons, st.text(max_size=1024)),
    st.builds(Cancel, tickets, reasons),
    st.builds(Revoke, tickets, reservations),
    st.builds(Revoked, tickets, reservations),
)

TICKET = HandoffTicket("r", 1)


def test_all_messages_are_tried() -> None:
    seen: set[type] = set()

    @given(messages)
    @settings(derandomize=True, max_examples=300, database=None)
    def note(message: Message) -> None:
        seen.add(type(message))

    note()
    assert seen == set(get_args(Message))


@given(messages)
def test_what_goes_in_comes_out(message: Message) -> None:
    assert decode(encode(message)) == message


def survives(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert isinstance(decode(data), Message)


@given(st.binary(max_size=300))
@example(b"")
@example(bytes([0xDD, 0xFF, 0xFF, 0xFF, 0xFF, VERSION]))  # an array of 2**32 - 1 items
@example(bytes([0x92, VERSION]) + b"\xc6\xff\xff\xff\xff")
def test_whatever_comes_in_is_a_message_or_a_bad_one(data: bytes) -> None:
    survives(data)


@pytest.mark.parametrize(
    "front",
    [
        b"",
        bytes([0x92, VERSION]),
        bytes([0x93, VERSION]) + b"\x80",
        bytes([0x92, VERSION]) + b"\x82\xa4type\xa9heartbeat\xa1x",
    ],
    ids=["alone", "message", "behind the message", "unknown field"],
)
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x"], ids=["arrays", "maps"])
def test_what_is_nested_deeper_than_any_stack_is_bad(front: bytes, opening: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(front + opening * 100_000)


@given(messages, st.data())
def test_a_damaged_message_is_a_message_or_a_bad_one(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    survives(bytes(damaged))


@given(messages, st.data())
def test_a_message_that_was_cut_off_is_bad(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(BadMessage):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(BadMessage):
        decode(whole + b"\x00")


def test_what_is_too_long_is_neither_sent_nor_read() -> None:
    checksums = (2**64 - 1,) * (MAX_MESSAGE_BYTES // 9)
    with pytest.raises(BadMessage, match=f"at most {MAX_MESSAGE_BYTES} may be sent"):
        encode(Commit(TICKET, 1, (1,), checksums))
    with pytest.raises(BadMessage, match=f"{MAX_MESSAGE_BYTES + 1} bytes; at most"):
        decode(b"\x00" * (MAX_MESSAGE_BYTES + 1))


def test_the_largest_hand_off_fits() -> None:
    blocks = tuple(range(2**32 - 32_768, 2**32))
    for message in (
        Commit(TICKET, 2**20, (1,), (2**64 - 1,) * 32_768),
        Destination(TICKET, 1, 0, blocks),
    ):
        assert decode(encode(message)) == message


@pytest.mark.parametrize("version", [0, VERSION + 1, 255])
def test_another_version_is_named(version: int) -> None:
    """Even if its messages look like nothing that we know."""
    for content in ({"type": "heartbeat"}, ["something", "else"], None):
        data = msgspec.msgpack.encode([version, content])
        expected = f"the peer speaks version {version}, this node version {VERSION}"
        with pytest.raises(BadMessage, match=re.escape(expected)):
            decode(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"first_block": -1},
        {"reservation": 0},
        {"block_ids": [1, -1]},
        {"block_ids": [1, 0]},
        {"ticket": {}},
    ],
    ids=str,
)
def test_a_destination_that_cannot_be_is_bad(changes: dict[str, object]) -> None:
    content: dict[str, object] = {
        "type": "destination",
        "ticket": {"request_id": "r", "generation": 0},
        "reservation": 1,
        "first_block": 0,
        "block_ids": [1, 2],
    }
    assert isinstance(decode(msgspec.msgpack.encode([VERSION, content])), Destination)
    with pytest.raises(BadMessage):
        decode(msgspec.msgpack.encode([VERSION, content | changes]))
