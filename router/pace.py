"""How long a node's steps take, as far as its statuses tell.

Between two statuses of a node that was busy at both, `num_steps` counts the steps and the times
of the statuses tell how long they took. For a decode node that is the time between two tokens.

    status      busy, 100 steps     busy, 120 steps     idle     busy
    measured         └── 0.4 s / 20 ──┘      nothing: it may have waited in between

A measurement counts for a while only: a node that is avoided because it was slow has nothing to
do, so nothing would ever tell that it is not slow any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol import NodeStatus

_SMOOTHING = 0.3  # of the newest measurement
_VALID_S = 30.0
_MIN_SPAN_S = 0.2  # shorter ones are mostly the jitter of messages


@dataclass(frozen=True)
class _Mark:
    at: float
    num_steps: int


class Pace:
    """Seconds for a step, by node."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._measured: dict[str, tuple[float, float]] = {}  # → seconds for a step, when

    def observed(self, status: NodeStatus, *, taken_at: float) -> None:
        """Statuses of a node in their order; the same one again changes nothing."""
        node_id = status.node_id
        if status.num_running == 0:
            self._marks.pop(node_id, None)
            return
        mark = self._marks.get(node_id)
        num_steps = 0 if mark is None else status.num_steps - mark.num_steps
        if mark is None or num_steps < 0:
            self._marks[node_id] = _Mark(taken_at, status.num_steps)
        elif num_steps > 0 and taken_at - mark.at >= _MIN_SPAN_S:
            self._marks[node_id] = _Mark(taken_at, status.num_steps)
            self._measure(node_id, (taken_at - mark.at) / num_steps, taken_at)

    def step_s(self, node_id: str, now: float) -> float:
        """0: not measured lately."""
        seconds, at = self._measured.get(node_id, (0.0, now))
        return seconds if now - at <= _VALID_S else 0.0

    def forget_node(self, node_id: str) -> None:
        self._marks.pop(node_id, None)
        self._measured.pop(node_id, None)

    def _measure(self, node_id: str, seconds: float, now: float) -> None:
        before = self.step_s(node_id, now) or seconds
        self._measured[node_id] = (before + _SMOOTHING * (seconds - before), now)
