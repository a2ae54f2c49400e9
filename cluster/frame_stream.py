"""Both ways of one socket, in frames: a length in four bytes, and then as many bytes.

    socket ─► │ read │ frame │ frame │ fra… ─► │ room │
              0      start                 end        64 KiB, or as much as the next frame needs

Whoever reads takes one frame after the other. If nobody does, the buffer is full at some time, and
the socket is not read until there is room.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from kv_transfer import BadMessage

_LENGTH = struct.Struct("<I")
_ROOM_BYTES = 64 << 10  # a larger frame has more, as long as it is there


class _Taking(NamedTuple):
    """Whoever has all frames taken at once."""

    check_length: Callable[[int], None]
    take: Callable[[bytes], None]
    ended: asyncio.Future[None]


class FrameStream(asyncio.BufferedProtocol):
    """Belongs to one event loop; one reads, and one writes, at a time."""

    def __init__(self, on_open: Callable[[FrameStream], None] = lambda stream: None) -> None:
        self.transport: asyncio.Transport  # once it is open
        self.heard_at = time.monotonic()  # the last bytes, be they a whole frame or not
        self._on_open = on_open
        self._buffer = bytearray(_ROOM_BYTES)
        self._start = self._end = 0
        self._paused = False
        self._waiting: asyncio.Future[None] | None = None  # whoever reads the next
        self._taking: _Taking | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = asyncio.Event()

    @classmethod
    async def open(cls, end: socket.socket) -> FrameStream:
        """Takes a connected socket over."""
        loop = asyncio.get_running_loop()
        if end.family == socket.AF_UNIX:
            _, stream = await loop.create_unix_connection(cls, sock=end)
        else:
            _, stream = await loop.create_connection(cls, sock=end)
        return stream

    # ------------------------------------------------------------------ out

    def write(self, message: bytes) -> int:
        """Of any length below 4 GiB; returns how many bytes that takes."""
        frame = _LENGTH.pack(len(message)) + message
        self.transport.write(frame)
        return len(frame)

    async def drain(self) -> None:
        """Returns when little waits to be read. Raises ConnectionError: nobody will read it."""
        await self._writable.wait()
        if self._lost.is_set():
            raise ConnectionResetError("the connection is lost")

    async def close(self) -> None:
        """What was written may still be read."""
        self.transport.close()
        await self._lost.wait()

    def abort(self) -> None:
        """What was written may be lost."""
        self.transport.abort()

    # ------------------------------------------------------------------ in

    async def read(self, check_length: Callable[[int], None]) -> bytes | None:
        """The next frame, or None if there is no more. Raises as `check_length` does."""
        while True:
            frame = self._cut(check_length)
            if frame is not None or self._lost.is_set():
                return frame
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None

    async def read_all(
        self, check_length: Callable[[int], None], take: Callable[[bytes], None]
    ) -> None:
        """Have each frame taken in the very turn of the event loop in which it comes.

        Returns when there are no more. Raises BadMessage as soon as one of the two does.
        """
        self._taking = _Taking(check_length, take, asyncio.get_running_loop().create_future())
        try:
            self._hand_over(self._taking)
            await self._taking.ended
        finally:
            self._taking = None

    def _hand_over(self, taking: _Taking) -> None:
        if taking.ended.done():
            return
        try:
            while (frame := self._cut(taking.check_length)) is not None:
                taking.take(frame)
        except BadMessage as error:
            taking.ended.set_exception(error)
        else:
            if self._lost.is_set():
                taking.ended.set_result(None)

    def _cut(self, check_length: Callable[[int], None]) -> bytes | None:
        body = self._start + _LENGTH.size
        if self._end < body:
            self._make_room(_LENGTH.size)
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        check_length(length)
        if self._end < body + length:
            self._make_room(_LENGTH.size + length)
            return None
        self._start = body + length
        return bytes(memoryview(self._buffer)[body : self._start])

    def _make_room(self, num_bytes: int) -> None:
        """For a frame of that length, of which the beginning may be here."""
        if self._start + num_bytes > len(self._buffer) or self._start == self._end:
            rest = self._buffer[self._start : self._end]
            if len(self._buffer) != (size := max(num_bytes, _ROOM_BYTES)):
                self._buffer = bytearray(size)
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    # ------------------------------------------------------------------ from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._on_open(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.heard_at = time.monotonic()
        self._end += nbytes
        if self._end == len(self._buffer):
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self._writable.set()
        self._wake()

    def _wake(self) -> None:
        if self._taking is not None:
            self._hand_over(self._taking)
        elif self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
