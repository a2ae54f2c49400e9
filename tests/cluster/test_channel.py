"""Frames between a cluster and its node processes: whole, in order, bounded, and of one version."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import msgspec
import pytest

from cluster.channel import MAX_FRAME_BYTES, VERSION, Channel, envelopes_of
from kv_transfer import BadMessage


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Number(msgspec.Struct, frozen=True, tag="number"):
    number: int


@contextlib.asynccontextmanager
async def receiving() -> AsyncIterator[tuple[Channel[Text | Number], socket.socket]]:
    """A channel, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    channel: Channel[Text | Number] = await Channel.open(ours, envelopes_of(Text | Number))
    with theirs:
        try:
            yield channel, theirs
        finally:
            await channel.close()


async def test_messages_of_all_sizes_arrive_in_order() -> None:
    sent = [Text("x" * size) for size in (0, 1, 65_000, 70_000, 5_000_000)] + [Number(3)]
    ours, theirs = socket.socketpair()
    here: Channel[Text | Number] = await Channel.open(ours, envelopes_of(Text | Number))
    there: Channel[Text | Number] = await Channel.open(theirs, envelopes_of(Text | Number))

    async def send() -> None:
        here.post(Number(1))
        for message in sent:
            await here.send(message)
        await here.close()

    sending = asyncio.create_task(send())
    received = []
    while (message := await there.receive()) is not None:
        received.append(message)
    await sending
    await there.close()
    assert received == [Number(1), *sent]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (struct.pack("<I", MAX_FRAME_BYTES + 1), "at most"),
        (struct.pack("<I", 0xFFFFFFFF), "at most"),
        (struct.pack("<I", 3) + b"abc", "not a message"),
        (struct.pack("<I", 0), "not a message"),
    ],
    ids=["a byte too long", "4 GiB", "garbage", "empty"],
)
async def test_what_is_no_frame(data: bytes, problem: str) -> None:
    async with receiving() as (channel, other):
        other.send(data)
        with pytest.raises(BadMessage, match=problem):
            await channel.receive()


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        ([VERSION + 1, {"type": "text", "text": ""}], f"version {VERSION + 1}"),
        ([VERSION + 1, "of a later version"], f"version {VERSION + 1}"),
        ([VERSION, {"type": "file"}], "Invalid value 'file'"),
        ([VERSION, {"type": "text"}], "missing required field"),
    ],
    ids=["later version", "later form", "unknown", "incomplete"],
)
async def test_what_is_no_message(frame: object, problem: str) -> None:
    data = msgspec.msgpack.encode(frame)
    async with receiving() as (channel, other):
        other.send(struct.pack("<I", len(data)) + data)
        with pytest.raises(BadMessage, match=problem):
            await channel.receive()


@pytest.mark.parametrize("cut", [0, 2, 4, 6])
async def test_an_end_is_an_end_wherever_it_comes(cut: int) -> None:
    data = msgspec.msgpack.encode([VERSION, {"type": "text", "text": "abc"}])
    async with receiving() as (channel, other):
        other.send((struct.pack("<I", len(data)) + data)[:cut])
        other.close()
        assert await channel.receive() is None


async def test_what_nobody_would_read_is_not_sent() -> None:
    async with receiving() as (channel, _):
        with pytest.raises(BadMessage, match="may be sent"):
            await channel.send(Text("x" * MAX_FRAME_BYTES))


async def test_a_sender_waits_for_a_reader_that_is_slow() -> None:
    async with receiving() as (channel, other):
        sending = asyncio.create_task(channel.send(Text("x" * 10_000_000)))
        _, unsent = await asyncio.wait({sending}, timeout=0.1)
        assert unsent
        other.close()
        with pytest.raises(ConnectionError):
            await sending
