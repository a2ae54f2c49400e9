"""One way to serve a request, with what it would cost."""

from __future__ import annotations

from dataclasses import dataclass

from router.decision import RouteKind
from router.view import NodeView


@dataclass(frozen=True)
class Plan:
    """A prefill node and a decode node, or one node that needs no other."""

    kind: RouteKind
    prefill: NodeView | None
    decode: NodeView
    ttft_s: float  # predicted
    fits: bool  # whether the decode node has a seat and KV headroom now
