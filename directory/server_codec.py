"""How records and block events look on the server: MessagePack, checked when it is read.

Whatever else may write there is no reason to stop: what cannot be read is None.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from protocol import BlockEventBatch, NodeInfo, NodeStatus


class Registration(msgspec.Struct, frozen=True):
    info: NodeInfo
    ttl_s: float


class NumberedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch, and what is needed to notice that one before it is missing."""

    generation: int
    base: int  # the number before the first that was published under this registration
    batch: BlockEventBatch


@dataclass(frozen=True)
class WrittenStatus:
    """`beat` is another one for each heartbeat; times are the server's."""

    generation: int
    beat: str
    written_at_ms: int
    age_ms: int  # of the heartbeat when it was written
    status: NodeStatus | None


@dataclass(frozen=True)
class WrittenSpan:
    """The numbers of the batches that a node has published: those above `base`, up to `last`."""

    generation: int
    base: int
    last: int


@dataclass(frozen=True)
class LatestGeneration:
    number: int
    left: bool  # it was deregistered


_encode = msgspec.msgpack.Encoder().encode
_registration = msgspec.msgpack.Decoder(Registration)
_batches = msgspec.msgpack.Decoder(list[NumberedBatch])
_status = msgspec.msgpack.Decoder(NodeStatus)


def encode_registration(registration: Registration) -> bytes:
    return _encode(registration)


def decode_registration(blob: bytes) -> Registration | None:
    try:
        return _registration.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def encode_batches(batches: list[NumberedBatch]) -> bytes:
    return _encode(batches)


def decode_batches(blob: bytes) -> list[NumberedBatch] | None:
    try:
        return _batches.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def encode_status(status: NodeStatus) -> bytes:
    """Without its live transfers: most of its size, and nothing that a router asks for."""
    if status.transfers.live:
        transfers = msgspec.structs.replace(status.transfers, live=())
        status = msgspec.structs.replace(status, transfers=transfers)
    return _encode(status)


def decode_status(blob: bytes) -> WrittenStatus | None:
    try:
        generation, beat, written_at_ms, age_ms, status = blob.split(b":", 4)
        return WrittenStatus(
            generation=int(generation),
            beat=beat.decode(),
            written_at_ms=int(written_at_ms),
            age_ms=int(age_ms),
            status=_status.decode(status) if status else None,
        )
    except (ValueError, msgspec.DecodeError):
        return None


def decode_span(blob: bytes) -> WrittenSpan | None:
    try:
        return WrittenSpan(*map(int, blob.split(b":")))
    except (ValueError, TypeError):
        return None


def decode_generation(blob: bytes) -> LatestGeneration | None:
    number, _, left = blob.partition(b" ")
    try:
        return LatestGeneration(int(number), bool(left))
    except ValueError:
        return None
