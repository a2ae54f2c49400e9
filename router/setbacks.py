"""What has gone wrong with a request since its last token, and whether to try again.

fault    something failed: after `max_attempts` attempts in a row it is the request's end
loss     a node's end took the attempt: no fault of the request, so more of these are borne.
         But not without end: a request may be what ends the nodes
moved    a node gives the attempt up, or did not take it, because it drains or is full: counts
         as a loss, and does not wait at first
"""

from __future__ import annotations

import enum
import random

from protocol import NodeDraining, NodeLost, Overloaded, WrongRole
from router.config import RouterConfig


class Setback(enum.Enum):
    FAULT = "fault"
    LOSS = "loss"
    MOVED = "moved"

    @classmethod
    def of(cls, label: str) -> Setback:
        """The kind of an error, by its label."""
        return _BY_LABEL.get(label, cls.FAULT)


_BY_LABEL = {
    NodeLost.label: Setback.LOSS,
    **{error.label: Setback.MOVED for error in (Overloaded, NodeDraining, WrongRole)},
}


class Setbacks:
    """Of one request."""

    def __init__(self, config: RouterConfig, chance: random.Random) -> None:
        self._config = config
        self._chance = chance
        self._num_tokens = 0  # that there were when something went wrong last
        self._counts = dict.fromkeys(Setback, 0)

    def note(self, label: str, num_tokens: int) -> None:
        """An attempt has failed when the request had so many tokens."""
        if num_tokens > self._num_tokens:
            self._counts = dict.fromkeys(Setback, 0)
            self._num_tokens = num_tokens
        self._counts[Setback.of(label)] += 1

    @property
    def too_many(self) -> bool:
        taken = self._counts[Setback.LOSS] + self._counts[Setback.MOVED]
        return (
            self._counts[Setback.FAULT] >= self._config.max_attempts
            or taken >= self._config.max_lost_attempts
        )

    def pause_s(self) -> float:
        """Before the next attempt; different for each request, or all would come at once."""
        moved = self._counts[Setback.MOVED]
        others = sum(self._counts.values()) - moved
        doublings = others + max(0, moved - 1) - 1
        if doublings < 0:
            return 0.0
        factor: int = 2**doublings
        backoff_s = min(self._config.retry_backoff_s * factor, self._config.retry_backoff_max_s)
        return backoff_s * (1 + self._config.retry_jitter * self._chance.random())
