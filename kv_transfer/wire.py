"""What the two ends of a hand-off say to each other.

       P                                   D
       ── PrefillStarted ────────────────►    reserve blocks now
       ◄──────────────────── Destination ──   these are mine, from this block of the prompt on
       ══ blocks ════════════════════════►
       ── Heartbeat ─────────────────────►    still alive, whatever takes so long
       ── Commit ────────────────────────►    all is there; here is the first token
    or ── Closed ────────────────────────►    nothing will follow, and why
       ◄───────────────────────── Cancel ──   stop; answered by Closed

Commit and Closed are proof that P writes no more under that ticket.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_transfer.states import Reason
from protocol import HandoffTicket, KvrelayError

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20  # a commit of 32k blocks with checksums fits


class BadMessage(KvrelayError):
    """A message is too long, of another version, or not a message at all."""

    label = "bad_message"


class PrefillStarted(msgspec.Struct, frozen=True, tag="started"):
    ticket: HandoffTicket
    source: str  # P's endpoint


class Destination(msgspec.Struct, frozen=True, tag="destination"):
    """`block_ids[i]` takes block number `first_block + i` of the prompt."""

    ticket: HandoffTicket
    sender: str  # D's endpoint
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    block_ids: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]  # 0 is the null block


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    ticket: HandoffTicket


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """`checksums` are those of the destination's blocks, in their order; empty if off."""

    ticket: HandoffTicket
    token_ids: tuple[int, ...]
    checksums: tuple[int, ...]


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    ticket: HandoffTicket
    reason: Reason


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """D wants no more of this."""

    ticket: HandoffTicket
    reason: Reason
    sender: str  # D's endpoint, for the answer


Message = PrefillStarted | Destination | Heartbeat | Commit | Closed | Cancel


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    message: Message


class _Version(msgspec.Struct, frozen=True, array_like=True):
    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Envelope)
_version_decoder = msgspec.msgpack.Decoder(_Version)


def encode(message: Message) -> bytes:
    """Raises BadMessage if it would be longer than a peer accepts."""
    data = _encoder.encode(_Envelope(VERSION, message))
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} may be sent")
    return data


def decode(data: bytes) -> Message:
    """Raises BadMessage; anything may come in."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        version = _version_decoder.decode(data).version
        if version != VERSION:
            raise BadMessage(f"the peer speaks version {version}, this node version {VERSION}")
        return _decoder.decode(data).message
    except (msgspec.MsgspecError, RecursionError) as error:  # nested deeper than any stack
        raise BadMessage(f"not a message: {error}") from error
