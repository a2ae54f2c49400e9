"""Messages between two processes, over a socket whose other end is known.

Both were born with it, or have proven to each other who they are. A frame is its length in four
bytes, and then `[version, message]` in msgpack.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from cluster.frame_stream import FrameStream
from kv_transfer import Envelopes

VERSION = 2
MAX_FRAME_BYTES = 64 << 20  # the snapshot of a pool of a million blocks fits

MessageT = TypeVar("MessageT")


class Channel(Generic[MessageT]):
    """One end, in an event loop. `MessageT` is what comes in; anything may go out."""

    def __init__(self, stream: FrameStream, envelopes: Envelopes[MessageT]) -> None:
        self.said_at = time.monotonic()
        self._stream = stream
        self._envelopes = envelopes
        self._sending = asyncio.Lock()
        self._num_bytes = 0  # written

    @classmethod
    async def open(cls, end: socket.socket, envelopes: Envelopes[MessageT]) -> Channel[MessageT]:
        """Takes the socket over."""
        return cls(await FrameStream.open(end), envelopes)

    # ------------------------------------------------------------------ life signs

    @property
    def heard_at(self) -> float:
        """When the last bytes came, on the monotonic clock."""
        return self._stream.heard_at

    @property
    def num_unsent_bytes(self) -> int:
        """That the other end has left no room for."""
        return self._stream.transport.get_write_buffer_size()

    @property
    def num_sent_bytes(self) -> int:
        return self._num_bytes - self.num_unsent_bytes

    # ------------------------------------------------------------------ words

    def post(self, message: object) -> None:
        """Send without waiting. For what is small, and comes seldom; it stays in order.

        Raises BadMessage: the other end would not read it.
        """
        self._write(self._envelopes.encode(message))

    async def send(self, message: object) -> None:
        """Returns when little of what was sent before waits to be read.

        Raises OSError: the other end is closed. BadMessage: it would not read it.
        """
        data = self._envelopes.encode(message)
        async with self._sending:  # so at most one frame is in memory for a reader that is slow
            self._write(data)
            await self._stream.drain()

    async def receive(self) -> MessageT | None:
        """The next message, or None if the other end was closed or cannot be reached any more.

        Raises BadMessage: it is too long, of another version, or no message.
        """
        data = await self._stream.read(self._envelopes.check_length)
        return None if data is None else self._envelopes.decode(data)

    async def receive_all(self, take: Callable[[MessageT], None]) -> None:
        """Have each message taken as soon as it comes; returns where `receive` would give None.

        Cheaper than to wait for each. Raises BadMessage, as `receive` does.
        """
        decode = self._envelopes.decode
        await self._stream.read_all(self._envelopes.check_length, lambda data: take(decode(data)))

    async def close(self) -> None:
        """What was sent may still be read."""
        await self._stream.close()

    def abort(self) -> None:
        """Both ends hear of it now; what was not read yet is lost."""
        self._stream.abort()

    def _write(self, data: bytes) -> None:
        self.said_at = time.monotonic()
        self._num_bytes += self._stream.write(data)


def envelopes_of(union: Any) -> Envelopes[Any]:
    """Of frames that hold one of these structs, in which paths and dataclasses may be."""
    return Envelopes(
        union,
        version=VERSION,
        max_bytes=MAX_FRAME_BYTES,
        enc_hook=_encode_path,
        dec_hook=_decode_path,
    )


def _encode_path(value: object) -> str:
    assert isinstance(value, Path), value
    return str(value)


def _decode_path(kind: type, value: Any) -> Path:
    assert issubclass(kind, Path), kind
    return Path(value)
