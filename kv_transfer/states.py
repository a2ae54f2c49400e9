"""The life of a hand-off, and the reasons for which one can end unhappily.

                    ┌──────────── abort, deadline, failure ─────────────┐
    RESERVING ◄─► READY ──► PUSHING ──► COMMITTED          ABORTED | EXPIRED | FAILED
    no blocks     D has     bytes are   D has all blocks   every one of them with a reason
    at D yet      reserved  moving      and the token

At P, RESERVING lasts until D's destination is known; at D, until D's scheduler gives blocks. A
reservation may be taken back while nothing moves.
"""

from __future__ import annotations

import enum


class HandoffState(enum.StrEnum):
    RESERVING = "reserving"
    READY = "ready"
    PUSHING = "pushing"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in _ENDED

    def may_become(self, later: HandoffState) -> bool:
        return later in _LATER[self]

    def then(self, later: HandoffState) -> HandoffState:
        """The later state, which must be one that may follow."""
        assert self.may_become(later), f"{self} → {later}"
        return later


_UNHAPPY = frozenset({HandoffState.ABORTED, HandoffState.EXPIRED, HandoffState.FAILED})
_ENDED = _UNHAPPY | {HandoffState.COMMITTED}
_LATER: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.RESERVING: _UNHAPPY | {HandoffState.READY},
    # A reservation that was taken back is made again. All may be at D already, by its own cache.
    HandoffState.READY: _UNHAPPY
    | {HandoffState.RESERVING, HandoffState.PUSHING, HandoffState.COMMITTED},
    HandoffState.PUSHING: _UNHAPPY | {HandoffState.COMMITTED},
    HandoffState.COMMITTED: frozenset(),
    HandoffState.ABORTED: frozenset(),
    HandoffState.EXPIRED: frozenset(),
    HandoffState.FAILED: frozenset(),
}


class Reason(enum.StrEnum):
    """Why a hand-off ended, or that it ended because the first token ended the request."""

    ENDED_BY_FIRST_TOKEN = "ended_by_first_token"
    CANCELLED = "cancelled"  # by the client, or by a shutdown
    PEER_CANCELLED = "peer_cancelled"
    PEER_LOST = "peer_lost"
    PEER_REFUSED = "peer_refused"  # token or version
    DEADLINE = "deadline"
    CHECKSUM = "checksum"
    LAYOUT = "layout"
    WRITE_FAILED = "write_failed"
    PREFILL_FAILED = "prefill_failed"
    DRAINING = "draining"  # one of the two nodes, which does not take until the end


def ended_state(reason: Reason) -> HandoffState:
    """The end state that goes with a reason."""
    match reason:
        case (
            Reason.ENDED_BY_FIRST_TOKEN | Reason.CANCELLED | Reason.PEER_CANCELLED | Reason.DRAINING
        ):
            return HandoffState.ABORTED
        case Reason.DEADLINE:
            return HandoffState.EXPIRED
        case _:
            return HandoffState.FAILED
