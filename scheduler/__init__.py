"""Which tokens are computed this step? Queues, budgets, blocks, prefix cache."""

from scheduler.config import CacheConfig, Policy, SchedulerConfig, SchedulerKnobs
from scheduler.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    RequestUpdate,
    SchedulerOutput,
)
from scheduler.queue import Wait
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler
from scheduler.state import PauseState
from scheduler.stats import SchedulerStats

__all__ = [
    "CacheConfig",
    "CachedRequestData",
    "ModelRunnerOutput",
    "NewRequestData",
    "PauseState",
    "Policy",
    "Request",
    "RequestStatus",
    "RequestUpdate",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerKnobs",
    "SchedulerOutput",
    "SchedulerStats",
    "Wait",
]
