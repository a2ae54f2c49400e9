"""What the router has sent to each node and the node's last status does not show yet.

A status is a photograph of a node, taken at `taken_at`. Whatever was sent since is missing in
it, and a burst would herd onto the node that looked idle. So each job is counted here until a
status shows it, part by part, and never in both places:

    part            missing in a status taken           gone for good
    request         before the node took the job        when the attempt ends
    queued tokens   before the node took the job        when its first token is seen
    blocks          before the job got its blocks       when the attempt ends

When a job got its blocks is not told, but how many have none yet is: those in the intake and
in the waiting queue. Both are served in order, so they are the youngest of the jobs that the node
had taken and that had no first token by then. (Work of other routers is in the statuses too; if
theirs is younger, some of ours is counted twice for a while: too much caution, never too little.)

What ended since the photograph stays in it until the next one; that errs on the same side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protocol import HandoffTicket, NodeStatus
from router.view import NodeLoad

_NEVER = float("inf")


@dataclass
class _Sent:
    """The part of one attempt that is on one node."""

    load: NodeLoad
    taken_at: float = _NEVER
    first_token_at: float = _NEVER


@dataclass(frozen=True)
class _Photograph:
    taken_at: float = -_NEVER
    num_without_blocks: int = 0


class LoadTracker:
    """Counts per attempt (`HandoffTicket`) and node. Belongs to the router's event loop.

    sent ──► taken (the node's call returned) ──► first_token ──► ended
      └───────────┴── a failure at any point is `ended` ────────────┘
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._attempts: dict[HandoffTicket, tuple[str, ...]] = {}  # → the nodes it is on
        self._nodes: dict[str, dict[HandoffTicket, _Sent]] = {}  # oldest first
        self._photographs: dict[str, _Photograph] = {}

    def sent(self, ticket: HandoffTicket, loads: Mapping[str, NodeLoad]) -> None:
        """The attempt is on its way to these nodes (`RoutingDecision.loads`)."""
        assert ticket not in self._attempts
        self._attempts[ticket] = tuple(loads)
        for node_id, load in loads.items():
            self._nodes.setdefault(node_id, {})[ticket] = _Sent(load)

    def taken(self, ticket: HandoffTicket, node_id: str) -> None:
        """The node has the job: a status that it gives from now on shows it."""
        sent = self._nodes.get(node_id, {}).get(ticket)
        if sent is not None:
            sent.taken_at = min(sent.taken_at, self._clock())

    def first_token(self, ticket: HandoffTicket) -> None:
        """The prompt is computed, and all nodes of the attempt have their blocks."""
        now = self._clock()
        for node_id in self._attempts.get(ticket, ()):
            sent = self._nodes.get(node_id, {}).get(ticket)
            if sent is not None:
                sent.taken_at = min(sent.taken_at, now)
                sent.first_token_at = min(sent.first_token_at, now)

    def ended(self, ticket: HandoffTicket) -> None:
        """The attempt is over, well or not. Harmless when repeated."""
        for node_id in self._attempts.pop(ticket, ()):
            on_node = self._nodes.get(node_id, {})
            on_node.pop(ticket, None)
            if not on_node:
                self._nodes.pop(node_id, None)

    def observed(self, status: NodeStatus, *, taken_at: float) -> None:
        """The view now uses this status, taken not before `taken_at` of the tracker's clock.

        (When it was asked for; or for a heartbeat: when it arrived, less the longest way.)
        """
        known = self._photographs.get(status.node_id, _Photograph())
        if taken_at < known.taken_at:
            return
        num_without_blocks = status.num_intake + status.num_waiting
        self._photographs[status.node_id] = _Photograph(taken_at, num_without_blocks)
        on_node = self._nodes.get(status.node_id, {})
        for ticket in [t for t, sent in on_node.items() if sent.first_token_at <= taken_at]:
            del on_node[ticket]  # all of it is in the status now

    def forget_node(self, node_id: str) -> None:
        """The node is gone, and with it all that it had."""
        self._nodes.pop(node_id, None)
        self._photographs.pop(node_id, None)

    def load(self, node_id: str) -> NodeLoad:
        """What to add to the status last observed."""
        photograph = self._photographs.get(node_id, _Photograph())
        num_without_blocks = photograph.num_without_blocks
        tokens = blocks = requests = 0
        for sent in reversed(self._nodes.get(node_id, {}).values()):
            if sent.taken_at > photograph.taken_at:
                tokens += sent.load.queued_tokens if sent.first_token_at == _NEVER else 0
                blocks += sent.load.blocks
                requests += sent.load.requests
            elif num_without_blocks > 0:
                num_without_blocks -= 1
                blocks += sent.load.blocks
        return NodeLoad(tokens, blocks, requests)

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)
