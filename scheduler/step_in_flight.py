"""A step that the runner has, and whose results are not known yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.output import SchedulerOutput
from scheduler.request import Request


@dataclass
class StepInFlight:
    """Names requests by identity: an id may be used again while the step runs."""

    output: SchedulerOutput
    requests: list[Request]
    void: set[Request] = field(default_factory=set)  # whose results do not count
