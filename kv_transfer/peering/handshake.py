"""Two nodes prove to each other that they know the cluster's token, and show their passports.

       dialler                                listener
       ── Hello: nonce, whom it wants ──────►    is that me? do we speak one version?
       ◄─────────────────────── Challenge: nonce ──
       ── Introduction: passport, proof ────►    is the proof right?
       ── extra, if any ────────────────────►
       ◄───────────────── Welcome: passport, proof ──    descriptors come along
       ◄──────────────────────── extra, if any ──
    or ◄────────────────────────────── Refusal ──    why

A proof signs everything that was said before it, and the passport, so it is of no use in any other
handshake. Written as generators, which know no sockets: they yield what is to be sent, and how long
the answer may be, and are sent the answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from kv_transfer.envelope import BadMessage, Envelopes, OtherVersion
from kv_transfer.peering.cluster_token import PROOF_BYTES, ClusterToken
from kv_transfer.peering.frames import frame
from kv_transfer.peering.passport import Passport, Text
from kv_transfer.transport import PeerRefused, PeerUnreachable

VERSION = 1
MAX_HANDSHAKE_BYTES = 16 << 10  # of one message, before anybody is known

_NONCE_BYTES = 32
_MAX_REASON_CHARS = 500

_Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
_Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    nonce: _Nonce
    sender: Text  # endpoint
    wanted: Text  # endpoint


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: _Nonce


class Introduction(msgspec.Struct, frozen=True, tag="introduction"):
    passport: bytes
    proof: _Proof


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    passport: bytes
    proof: _Proof


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    reason: Annotated[str, msgspec.Meta(max_length=_MAX_REASON_CHARS)]
    gone: bool = False  # whoever was meant is not here any more


_Message = Hello | Challenge | Introduction | Welcome | Refusal
_M = TypeVar("_M", Hello, Challenge, Introduction, Welcome)


_envelopes: Envelopes[_Message] = Envelopes(
    _Message, version=VERSION, max_bytes=MAX_HANDSHAKE_BYTES
)
_encoder = msgspec.msgpack.Encoder()
_passport_decoder = msgspec.msgpack.Decoder(Passport)


class Say(NamedTuple):
    """One turn of a handshake."""

    data: bytes  # to be sent, framed already
    answer_limit: int = MAX_HANDSHAKE_BYTES


class Met(NamedTuple):
    """The peer, proven to be one of the cluster."""

    passport: Passport
    extra: bytes
    welcome: bytes = b""  # the listener's last word, framed, to be sent with its descriptors


class Identity(NamedTuple):
    """Who this node is to its peers."""

    token: ClusterToken
    passport: Passport
    extra: bytes
    max_extra_bytes: int  # of a peer

    @property
    def framed_extra(self) -> bytes:
        return frame(self.extra) if self.extra else b""


Handshake = Generator[Say, bytes, Met]


def dial(me: Identity, peer: str) -> Handshake:
    """The dialler's side. Raises PeerRefused, or PeerUnreachable: another node is there now."""
    hello = encode(Hello(secrets.token_bytes(_NONCE_BYTES), me.passport.endpoint, peer))
    challenge = yield Say(frame(hello))
    _expect(Challenge, challenge)
    passport = _encoder.encode(me.passport)
    proof = me.token.sign(b"dialler", hello, challenge, passport)
    introduction = encode(Introduction(passport, proof))
    answer = yield Say(frame(introduction) + me.framed_extra)
    welcome = _expect(Welcome, answer)
    signed = (b"listener", hello, challenge, introduction, welcome.passport)
    met = _read_passport(me, welcome.passport, welcome.proof, signed)
    if met.endpoint != peer:
        raise PeerUnreachable(f"{met.endpoint} answers instead of {peer}")
    return (yield from _take_extra(me, met))


def listen(me: Identity) -> Handshake:
    """The listener's side. Raises PeerRefused."""
    hello = yield Say(b"")
    greeting = _expect(Hello, hello)
    if greeting.wanted != me.passport.endpoint:
        raise _WrongNode(f"this is {me.passport.endpoint}, not {greeting.wanted}")
    challenge = encode(Challenge(secrets.token_bytes(_NONCE_BYTES)))
    introduction = yield Say(frame(challenge))
    shown = _expect(Introduction, introduction)
    signed = (b"dialler", hello, challenge, shown.passport)
    passport = _read_passport(me, shown.passport, shown.proof, signed)
    if passport.endpoint != greeting.sender:
        raise PeerRefused(f"{greeting.sender} shows the passport of {passport.endpoint}")
    met = yield from _take_extra(me, passport)
    own = _encoder.encode(me.passport)
    proof = me.token.sign(b"listener", hello, challenge, introduction, own)
    welcome = frame(encode(Welcome(own, proof))) + me.framed_extra
    return met._replace(welcome=welcome)


class _WrongNode(PeerRefused):
    """The dialler means somebody who was here before."""


def refusal(error: PeerUnreachable) -> bytes:
    """What to tell a peer that is not let in, framed."""
    reason = Refusal(str(error)[:_MAX_REASON_CHARS], isinstance(error, _WrongNode))
    return frame(encode(reason))


def encode(message: _Message) -> bytes:
    return _envelopes.encode(message)


def _expect(kind: type[_M], data: bytes) -> _M:
    """Raises PeerRefused: another version, no message at all, or the peer refuses."""
    try:
        message = _envelopes.decode(data)
    except OtherVersion as error:
        raise PeerRefused(str(error)) from error
    except BadMessage as error:
        raise PeerRefused("the peer speaks something else") from error
    if isinstance(message, Refusal):
        raise (PeerUnreachable if message.gone else PeerRefused)(f"refused: {message.reason}")
    if not isinstance(message, kind):
        raise PeerRefused(f"the peer says {type(message).__name__} instead of {kind.__name__}")
    return message


def _read_passport(
    me: Identity, passport: bytes, proof: bytes, signed: tuple[bytes, ...]
) -> Passport:
    if not me.token.has_signed(proof, *signed):
        raise PeerRefused("the peer has another cluster token than this node")
    try:
        read = _passport_decoder.decode(passport)
    except msgspec.MsgspecError as error:
        raise PeerRefused(f"the peer's passport cannot be read: {error}") from error
    if read.extra_bytes > me.max_extra_bytes:
        raise PeerRefused(
            f"{read.endpoint} has {read.extra_bytes} bytes to say about its transport; "
            f"at most {me.max_extra_bytes} are read"
        )
    return read


def _take_extra(me: Identity, passport: Passport) -> Generator[Say, bytes, Met]:
    if not passport.extra_bytes:
        return Met(passport, b"")
    extra = yield Say(b"", answer_limit=passport.extra_bytes)
    passport.check_extra(extra)
    return Met(passport, extra)
