"""Bytes cut into messages: a length of four bytes, big-endian, and then as many bytes."""

from __future__ import annotations

from kv_transfer.transport import PeerRefused

_HEADER_BYTES = 4


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(_HEADER_BYTES, "big") + message


class Frames:
    """Takes bytes as they come. Looks at a length before it keeps what belongs to it.

    `limit` holds for the message that comes next; it grows once the peer is known.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> bytes | None:
        """The next whole message, or None. Raises PeerRefused: it is to be longer than allowed."""
        if len(self._bytes) < _HEADER_BYTES:
            return None
        length = int.from_bytes(self._bytes[:_HEADER_BYTES], "big")
        if length > self.limit:
            raise PeerRefused(
                f"a message of {length} bytes was announced; at most {self.limit} are read"
            )
        end = _HEADER_BYTES + length
        if len(self._bytes) < end:
            return None
        message = bytes(self._bytes[_HEADER_BYTES:end])
        del self._bytes[:end]
        return message
