"""Which tokens are computed this step? Queues, budgets, blocks, prefix cache."""

from scheduler.config import CacheConfig, Policy, SchedulerConfig
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
    "Policy",
    "Request",
    "RequestStatus",
    "RequestUpdate",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
]
