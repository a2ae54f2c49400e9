"""Which tokens are computed this step? Queues, budgets, blocks, prefix cache."""

from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import RequestUpdate, Scheduler
from scheduler.stats import SchedulerStats

__all__ = [
    "CacheConfig",
    "CachedRequestData",
    "ModelRunnerOutput",
    "NewRequestData",
    "Request",
    "RequestStatus",
    "RequestUpdate",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
]
