"""When there are too few or too many nodes of a role: a rule with bounds and patience.

                queue time (prefill) or KV use (decode), over all nodes of the role
    target + tolerance ─────────────────────────────  above for `scale_up_after_s`: one more
                            nothing happens
    target - tolerance ─────────────────────────────  below for `scale_down_after_s`, and it would
                                                      not be above with one less: one less

A unified node is measured by both, whichever is worse. Nodes that restart or drain count for the
number and not for the measure; while there are such, nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.autoscaling_config import AutoscalingConfig, ScalingBounds
from directory import NodeRecord
from protocol import NodeStatus, Role


@dataclass(frozen=True)
class Measure:
    """How much of what it should bear a role bears: 1.0 is on target."""

    pressure: float
    words: str


class Autoscaler:
    """Looked at now and then; remembers since when each role has been off its target."""

    def __init__(
        self, config: AutoscalingConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._above_since: dict[Role, float] = {}
        self._below_since: dict[Role, float] = {}
        self._why: list[str] = []

    def look(self, records: Sequence[NodeRecord], counts: Mapping[Role, int]) -> dict[Role, int]:
        """The new numbers of nodes of those roles whose number should change."""
        self._why = []
        wishes = {role: self._look_at(role, count, records) for role, count in counts.items()}
        return {role: wish for role, wish in wishes.items() if wish != counts[role]}

    def explain(self) -> str:
        """Why the last look changed something."""
        return "; ".join(self._why)

    def _look_at(self, role: Role, count: int, records: Sequence[NodeRecord]) -> int:
        bounds: ScalingBounds = getattr(self._config, role.value)
        if bounds.min is not None and count < bounds.min:
            return self._wish(role, count, bounds.min, "below min")
        if bounds.max is None:
            return count
        statuses = [
            record.status
            for record in records
            if record.info.role is role and record.alive and record.status is not None
        ]
        if len(statuses) != count or any(s.draining or not s.healthy for s in statuses):
            self._forget(role)
            return count
        return self._weigh(role, count, bounds, self._measure(role, statuses))

    def _weigh(self, role: Role, count: int, bounds: ScalingBounds, measure: Measure) -> int:
        config, now = self._config, self._clock()
        least, most = bounds.min or 1, bounds.max or count
        above = measure.pressure > 1 + config.tolerance
        below = measure.pressure < 1 - config.tolerance
        with_one_less = measure.pressure * count / max(1, count - 1)
        below = below and with_one_less <= 1 + config.tolerance
        since_above = _since(self._above_since, role, above, now)
        since_below = _since(self._below_since, role, below, now)
        if above and now - since_above >= config.scale_up_after_s and count < most:
            return self._wish(role, count, count + 1, measure.words)
        if below and now - since_below >= config.scale_down_after_s and count > least:
            return self._wish(role, count, count - 1, measure.words)
        return count

    def _wish(self, role: Role, count: int, wish: int, why: str) -> int:
        self._why.append(f"{role} from {count} to {wish}: {why}")
        self._forget(role)
        return wish

    def _forget(self, role: Role) -> None:
        self._above_since.pop(role, None)
        self._below_since.pop(role, None)

    def _measure(self, role: Role, statuses: Sequence[NodeStatus]) -> Measure:
        queue = self._queue(statuses)
        memory = self._memory(statuses)
        if role is Role.PREFILL:
            return queue
        if role is Role.DECODE:
            return memory
        return max(queue, memory, key=lambda measure: measure.pressure)

    def _queue(self, statuses: Sequence[NodeStatus]) -> Measure:
        """Seconds until the prompts that wait are computed, on average over the nodes."""
        seconds = sum(
            status.queued_tokens / status.prefill_tokens_per_s
            for status in statuses
            if status.prefill_tokens_per_s
        ) / len(statuses)
        target = self._config.target_queue_s
        return Measure(seconds / target, f"queues of {seconds:.2f} s, target {target:g} s")

    def _memory(self, statuses: Sequence[NodeStatus]) -> Measure:
        used = sum(status.blocks.used for status in statuses)
        total = sum(status.blocks.total for status in statuses)
        share, target = used / total, self._config.target_kv_use
        return Measure(share / target, f"{share:.0%} of the KV blocks used, target {target:.0%}")


def _since(since: dict[Role, float], role: Role, holds: bool, now: float) -> float:
    if not holds:
        since.pop(role, None)
        return now
    return since.setdefault(role, now)
