"""Messages between two processes over a socket that both were born with.

Nothing listens anywhere, so there is nobody to authenticate. A frame is its length in four bytes,
and then `[version, message]` in msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from pathlib import Path
from typing import Any, Generic, TypeVar

from kv_transfer import Envelopes

VERSION = 1
MAX_FRAME_BYTES = 64 << 20  # the snapshot of a pool of a million blocks fits

MessageT = TypeVar("MessageT")

_LENGTH = struct.Struct("<I")


class Channel(Generic[MessageT]):
    """One end, in an event loop. `MessageT` is what comes in; anything may go out."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        envelopes: Envelopes[MessageT],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._envelopes = envelopes
        self._sending = asyncio.Lock()

    @classmethod
    async def open(cls, end: socket.socket, envelopes: Envelopes[MessageT]) -> Channel[MessageT]:
        """Takes the socket over."""
        return cls(*await asyncio.open_unix_connection(sock=end), envelopes)

    def post(self, message: object) -> None:
        """Send without waiting. For what is small, and comes seldom; it stays in order."""
        self._writer.write(self._frame(message))

    async def send(self, message: object) -> None:
        """Returns when little of what was sent before waits to be read.

        Raises OSError: the other end is closed.
        """
        frame = self._frame(message)
        async with self._sending:  # so at most one frame is in memory for a reader that is slow
            self._writer.write(frame)
            await self._writer.drain()

    async def receive(self) -> MessageT | None:
        """The next message, or None if the other end was closed.

        Raises BadMessage: it is too long, of another version, or no message.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            self._envelopes.check_length(length)
            frame = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return self._envelopes.decode(frame)

    async def close(self) -> None:
        """What was sent may still be read."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the other end was faster
            await self._writer.wait_closed()

    def _frame(self, message: object) -> bytes:
        """Raises BadMessage: the other end would not read it."""
        data = self._envelopes.encode(message)
        return _LENGTH.pack(len(data)) + data


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
