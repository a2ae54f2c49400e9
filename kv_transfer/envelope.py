"""`[version, message]` in msgpack: what all messages between processes are wrapped in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from protocol import KvrelayError

MessageT = TypeVar("MessageT")


class BadMessage(KvrelayError):
    """A message is too long, of another version, or not a message at all."""

    label = "bad_message"


class OtherVersion(BadMessage):
    """The sender is of another release."""


class _Envelope(msgspec.Struct, Generic[MessageT], frozen=True, array_like=True):
    version: int
    message: MessageT


class _Version(msgspec.Struct, frozen=True, array_like=True):
    version: int


_version_decoder = msgspec.msgpack.Decoder(_Version)


class Envelopes(Generic[MessageT]):
    """Writes messages of any kind, and reads those of one union of structs."""

    def __init__(
        self,
        union: Any,
        *,
        version: int,
        max_bytes: int,
        enc_hook: Callable[[Any], Any] | None = None,
        dec_hook: Callable[[type, Any], Any] | None = None,
    ) -> None:
        """The hooks are those of msgspec, for types that it does not know."""
        envelope: Any = _Envelope[union]
        self.version = version
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
        self._decoder: msgspec.msgpack.Decoder[_Envelope[MessageT]] = msgspec.msgpack.Decoder(
            envelope, dec_hook=dec_hook
        )

    def encode(self, message: object) -> bytes:
        """Raises BadMessage if it would be longer than a peer accepts."""
        data = self._encoder.encode(_Envelope(self.version, message))
        self._check_length(len(data), "may be sent")
        return data

    def decode(self, data: bytes) -> MessageT:
        """Raises BadMessage; anything may come in."""
        self.check_length(len(data))
        try:
            version = _version_decoder.decode(data).version
            if version != self.version:
                raise OtherVersion(
                    f"the peer speaks version {version}, this node version {self.version}"
                )
            return self._decoder.decode(data).message
        except (msgspec.MsgspecError, RecursionError) as error:  # nested deeper than any stack
            raise BadMessage(f"not a message: {error}") from error

    def check_length(self, num_bytes: int) -> None:
        """Raises BadMessage: so many are not read."""
        self._check_length(num_bytes, "are read")

    def _check_length(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.max_bytes:
            raise BadMessage(f"a message of {num_bytes} bytes; at most {self.max_bytes} {what}")
