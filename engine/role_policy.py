"""What a role adds to a node."""

from __future__ import annotations

from typing import Protocol, TypeVar

from engine.active_job import ActiveJob
from protocol import Job, LiveTransfer, TransferCounts
from scheduler import RequestUpdate

JobT_contra = TypeVar("JobT_contra", bound=Job, contravariant=True)


class RolePolicy(Protocol):
    """All calls come from the engine's thread, but for `live`."""

    def act(self) -> None:
        """Act on what the connector has to tell."""

    def must_act(self) -> bool:
        """Whether the connector has something to tell."""

    def on_started(self, job: ActiveJob) -> None:
        """The job is computed for the first time."""

    def on_update(self, job: ActiveJob, update: RequestUpdate) -> None:
        """A step made tokens for the job, or ended it."""

    def on_cancel(self, job: ActiveJob) -> None:
        """The job is over here; the scheduler may or may not have known it."""

    def on_give_back(self, job: ActiveJob) -> None:
        """The node drains, and the job is about to end unfinished: the peer is to know why."""

    def ends_soon(self, job: ActiveJob) -> bool:
        """Whether no more has to be computed for it, so that it is worth a moment's patience."""

    def num_intake(self) -> int:
        """Jobs that are here and not yet in the scheduler."""

    def next_deadline(self) -> float | None:
        """On the monotonic clock: when `act` is due even if nothing happens."""

    def transfers(self) -> TransferCounts:
        """With no more than the number of those that are under way."""

    def live(self) -> tuple[LiveTransfer, ...]:
        """Hand-offs under way. May be called from any thread."""


class TakesJobs(RolePolicy, Protocol[JobT_contra]):
    """A role whose nodes get jobs of this kind."""

    def accept(self, job: JobT_contra) -> None:
        """The job is the node's now."""
