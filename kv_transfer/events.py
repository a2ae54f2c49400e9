"""What a hand-off has to tell the node that it belongs to."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kv_transfer.states import Reason


class EventKind(enum.Enum):
    STARTED = enum.auto()  # at D: P computes the first chunk, so it is time to reserve
    RESERVED = enum.auto()  # at D: blocks are reserved, P was told
    COMMITTED = enum.auto()  # at D: the KV is here
    LOST = enum.auto()  # at D: the KV will not come from this P
    LAPSED = enum.auto()  # at D: nor has any other P taken its place in time
    PUSHED = enum.auto()  # at P: some tokens have arrived at D
    RECOMPUTE = enum.auto()  # at P: D has blocks now, but ours had to be given up
    SENT = enum.auto()  # at P: the hand-off has ended, well or not


@dataclass(frozen=True)
class HandoffEvent:
    """Something that the node has to act on."""

    kind: EventKind
    request_id: str  # the scheduler's
    reason: Reason | None = None
    detail: str = ""
    at: float = 0.0  # the connector's clock
