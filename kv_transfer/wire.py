"""What the two ends of a hand-off say to each other.

       P                                   D
       ── PrefillStarted ────────────────►    reserve blocks now
       ◄──────────────────── Destination ──   these are mine, from this block of the prompt on
       ── Pushing ───────────────────────►    bytes move from here on
       ══ blocks ════════════════════════►
       ── Heartbeat ─────────────────────►    still alive, whatever takes so long
       ── Commit ────────────────────────►    all is there; here is the first token
       ◄──────────────────────── Arrived ──   so it is; or, D does not want it any more
    or ── Closed ────────────────────────►    nothing will follow, and why
       ◄───────────────────────── Cancel ──   stop; answered by Closed
       ◄───────────────────────── Revoke ──   may D have that reservation back?
       ── Revoked ───────────────────────►    yes: nothing was and will be written there;
                                              or, by Pushing: no

Commit, Closed and Revoked are proof that P writes no more, under that ticket or to that
reservation. Any message may get lost, come twice or late. So whoever waits for an answer asks
again: P with PrefillStarted and Commit, D with Cancel and Revoke.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_transfer.envelope import Envelopes
from kv_transfer.states import Reason
from protocol import HandoffTicket

VERSION = 2
MAX_MESSAGE_BYTES = 1 << 20  # a commit of 32k blocks with checksums fits


class PrefillStarted(msgspec.Struct, frozen=True, tag="started"):
    ticket: HandoffTicket


class Destination(msgspec.Struct, frozen=True, tag="destination"):
    """`block_ids[i]` takes block number `first_block + i` of the prompt, in D's block size."""

    ticket: HandoffTicket
    reservation: Annotated[int, msgspec.Meta(ge=1)]  # of this ticket; void once taken back
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    block_ids: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]  # 0 is the null block


class Pushing(msgspec.Struct, frozen=True, tag="pushing"):
    ticket: HandoffTicket


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    ticket: HandoffTicket


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """`checksums` are those of the destination's blocks, in their order; empty if off."""

    ticket: HandoffTicket
    num_tokens: int  # whose KV is there
    token_ids: tuple[int, ...]
    checksums: tuple[int, ...]


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    ticket: HandoffTicket


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    ticket: HandoffTicket
    reason: Reason
    detail: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """D wants no more of this."""

    ticket: HandoffTicket
    reason: Reason


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    ticket: HandoffTicket
    reservation: int


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    ticket: HandoffTicket
    reservation: int


FromPrefill = PrefillStarted | Pushing | Heartbeat | Commit | Closed | Revoked
FromDecode = Destination | Arrived | Cancel | Revoke
Message = FromPrefill | FromDecode


_envelopes: Envelopes[Message] = Envelopes(Message, version=VERSION, max_bytes=MAX_MESSAGE_BYTES)


def encode(message: Message) -> bytes:
    """Raises BadMessage if it would be longer than a peer accepts."""
    return _envelopes.encode(message)


def decode(data: bytes) -> Message:
    """Raises BadMessage; anything may come in."""
    return _envelopes.decode(data)
