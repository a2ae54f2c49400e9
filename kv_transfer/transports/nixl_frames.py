"""What two nixl transports say to each other, between the messages of their nodes.

A node lets each peer write through an agent of its own, which is made when it is first needed:

       P                                   D
       ── Want ──────────────────────────►    I have something to write
       ◄────────────────────────── Offer ──   write here, through this agent made for you
    or ◄──────────────────────── NoOffer ──   there is none, and why
       ── Knock ─────────────────────────►    from there I connect to the agent, nobody else does
       ── Writing(begun) ────────────────►    turn the agent's wheels from now on
       ══ blocks ════════════════════════►
       ── Writing(over) ─────────────────►    leave them alone again
    or ── Broken ────────────────────────►    close the agent: what is still on its way is void
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from kv_transfer.envelope import BadMessage
from kv_transfer.transports.port_lock import MAX_SOURCES
from protocol import HandoffTicket

_OF_NODE, _OF_TRANSPORT = b"n", b"t"
_MAX_METADATA_BYTES = 1 << 18

Natural = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
Text = Annotated[str, msgspec.Meta(max_length=512)]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the passport, before anything is said."""

    nixl_version: Text
    device: Text  # of the pool: `cpu` or `cuda:N`


class Want(msgspec.Struct, frozen=True, tag="want"):
    """`seen` is the last offer that has arrived, if any: it is of no use any more."""

    seen: Natural = 0


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Of the agent `number`, counted from 1, and the pool that it knows.

    `void` are the tickets of earlier agents under which nothing may be written any more.
    """

    number: Natural
    nixl_version: Text
    agent: Text  # by this name NIXL knows it
    metadata: Annotated[bytes, msgspec.Meta(max_length=_MAX_METADATA_BYTES)]
    digest: bytes  # of the metadata
    device: Text
    address: Natural  # of the pool
    num_bytes: Natural
    port: Port  # to which the writer connects; 0, if it needs none
    void: tuple[HandoffTicket, ...] = ()

    @property
    def whole(self) -> bool:
        """NIXL may be given these metadata: it does not survive all that are damaged."""
        return self.digest == digest_of(self.metadata)


class NoOffer(msgspec.Struct, frozen=True, tag="no_offer"):
    problem: Annotated[str, msgspec.Meta(max_length=1024)]


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    number: Natural
    sources: Annotated[tuple[tuple[Text, Port], ...], msgspec.Meta(max_length=MAX_SOURCES)]


class Writing(msgspec.Struct, frozen=True, tag="writing"):
    number: Natural
    begun: bool


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    number: Natural


Frame = Want | Offer | NoOffer | Knock | Writing | Broken

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_hello_decoder = msgspec.msgpack.Decoder(Hello)


def digest_of(metadata: bytes) -> bytes:
    return hashlib.sha256(metadata).digest()


def encode_hello(hello: Hello) -> bytes:
    return _encoder.encode(hello)


def decode_hello(data: bytes) -> Hello:
    """Raises BadMessage."""
    try:
        return _hello_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise BadMessage(f"not what a nixl transport says of itself: {error}") from error


def of_node(message: bytes) -> bytes:
    return _OF_NODE + message


def of_transport(frame: Frame) -> bytes:
    return _OF_TRANSPORT + _encoder.encode(frame)


def parse(data: bytes) -> bytes | Frame:
    """The message of a node, or a frame of its transport. Raises BadMessage."""
    if data[:1] == _OF_NODE:
        return data[1:]
    if data[:1] != _OF_TRANSPORT:
        raise BadMessage(f"neither of a node nor of its transport: {data[:1]!r}")
    try:
        return _decoder.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise BadMessage(f"not a frame of a nixl transport: {error}") from error
