"""A caller and a node that listens prove to each other that they know the cluster's token.

       caller                           node
       ── Hello: nonce, whom it wants ──►    do we speak one version?
       ◄────────────── Challenge: nonce ──
       ── Introduction: proof ──────────►    is the proof right? is that me? is there room?
       ◄───────────────── Welcome: proof ──
    or ◄──────────────────────── Refusal ──  why

A proof signs all that was said before it, and in whose part, so it is of no use in any other
handshake, nor to the other side. Nothing of the node is told to who does not know the token.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from cluster.channel import VERSION, Channel
from kv_transfer import BadMessage, Envelopes, OtherVersion
from kv_transfer.peering import ClusterToken
from protocol import KvrelayError, NodeLost

MAX_HANDSHAKE_BYTES = 4 << 10  # of one message, before anybody is known

_SECRET_BYTES = 32  # of nonces, and of proofs
_MAX_REASON_CHARS = 500
_CALLER, _NODE = b"kvrelay caller of a node", b"kvrelay node"

_Bytes = Annotated[bytes, msgspec.Meta(min_length=_SECRET_BYTES, max_length=_SECRET_BYTES)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class RefusalReason(enum.StrEnum):
    TOKEN = "token"
    VERSION = "version"
    OTHER_NODE = "other_node"  # whoever is meant is not here, perhaps not any more
    FULL = "full"
    USER = "user"  # the other process is of another one
    PROTOCOL = "protocol"  # it speaks something else


class NodeRefused(KvrelayError):
    """Somebody is there, and one of the two does not want to speak with the other."""

    label = "node_refused"

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Wanted(msgspec.Struct, frozen=True):
    """Whom a caller means."""

    endpoint: _Text
    node_id: _Text
    generation: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    nonce: _Bytes
    wanted: Wanted


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: _Bytes


class Introduction(msgspec.Struct, frozen=True, tag="introduction"):
    proof: _Bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: _Bytes


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    reason: RefusalReason
    message: Annotated[str, msgspec.Meta(max_length=_MAX_REASON_CHARS)]


Handshake = Hello | Challenge | Introduction | Welcome | Refusal
_M = TypeVar("_M", Hello, Challenge, Introduction, Welcome)

envelopes_of_handshake: Envelopes[Handshake] = Envelopes(
    Handshake, version=VERSION, max_bytes=MAX_HANDSHAKE_BYTES
)
_encode = msgspec.msgpack.Encoder().encode


async def call_at(channel: Channel[Handshake], token: ClusterToken, wanted: Wanted) -> None:
    """The caller's side. Raises NodeRefused; NodeLost: it was closed."""
    hello = Hello(secrets.token_bytes(_SECRET_BYTES), wanted)
    challenge = await _exchange(channel, hello, Challenge)
    introduction = Introduction(token.sign(_CALLER, _encode(hello), challenge.nonce))
    welcome = await _exchange(channel, introduction, Welcome)
    signed = (_NODE, _encode(hello), challenge.nonce, introduction.proof)
    if not token.has_signed(welcome.proof, *signed):
        raise _other_token()


async def admit(
    channel: Channel[Handshake], token: ClusterToken, check: Callable[[Wanted], None]
) -> None:
    """The node's side. `check` raises NodeRefused if this is not who is wanted, or has no room.

    Raises NodeRefused, of which the caller has been told; NodeLost: it was closed.
    """
    try:
        hello = await _receive(channel, Hello)
        challenge = Challenge(secrets.token_bytes(_SECRET_BYTES))
        introduction = await _exchange(channel, challenge, Introduction)
        said = (_encode(hello), challenge.nonce)
        if not token.has_signed(introduction.proof, _CALLER, *said):
            raise _other_token()
        check(hello.wanted)
    except NodeRefused as error:
        refuse(channel, error)
        raise
    channel.post(Welcome(token.sign(_NODE, *said, introduction.proof)))


def refuse(channel: Channel[Handshake], error: NodeRefused) -> None:
    channel.post(Refusal(error.reason, str(error)[:_MAX_REASON_CHARS]))


async def _exchange(channel: Channel[Handshake], said: Handshake, kind: type[_M]) -> _M:
    channel.post(said)
    return await _receive(channel, kind)


async def _receive(channel: Channel[Handshake], kind: type[_M]) -> _M:
    try:
        message = await channel.receive()
    except OtherVersion as error:
        raise NodeRefused(RefusalReason.VERSION, str(error)) from error
    except BadMessage as error:
        raise NodeRefused(RefusalReason.PROTOCOL, "the other end speaks something else") from error
    if message is None:
        raise NodeLost("the other end closed the connection")
    if isinstance(message, Refusal):
        raise NodeRefused(message.reason, f"refused: {message.message}")
    if not isinstance(message, kind):
        raise NodeRefused(
            RefusalReason.PROTOCOL,
            f"the other end says {type(message).__name__} instead of {kind.__name__}",
        )
    return message


def _other_token() -> NodeRefused:
    return NodeRefused(RefusalReason.TOKEN, "the other end has another cluster token")
