"""What a role that hands off, or is handed to, does on its engine's thread."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.active_job import ActiveJob
from engine.host import EngineHost
from kv_transfer import HandoffConnector, HandoffEvent, OnTransferFailure, Reason
from protocol import KvrelayError, LiveTransfer, NodeDraining, TransferCounts, TransferFailed
from scheduler import RequestUpdate


class HandoffRole(ABC):
    """The part of a `RolePolicy` that is the same on both ends of a hand-off."""

    def __init__(self, host: EngineHost, connector: HandoffConnector) -> None:
        self._host = host
        self._connector = connector

    def act(self) -> None:
        for event in self._connector.take_events():
            active = self._host.jobs.get(event.request_id)
            if active is not None:
                self._on_event(active, event)

    def must_act(self) -> bool:
        return self._connector.has_events

    @property
    def _on_transfer_failure(self) -> OnTransferFailure:
        return self._connector.config.on_transfer_failure

    def _fail(self, active: ActiveJob, reason: Reason, detail: str) -> None:
        """The hand-off failed, and this node can do no more for the job."""
        error, retryable = self._blame(reason, detail)
        self._host.fail_job(active, error, retryable=retryable)

    def _blame(self, reason: Reason, detail: str) -> tuple[KvrelayError, bool]:
        """What the caller is to hear of a failure, and whether it may try again."""
        drains = reason is Reason.DRAINING  # which is no failure of the transfer
        fails = self._on_transfer_failure == "fail" and not drains
        outcome: OnTransferFailure = "fail" if fails else "retry"
        self._connector.note_outcome(outcome)
        error: KvrelayError = TransferFailed.because(reason, detail)
        if drains:
            error = NodeDraining(f"the peer of node {self._host.info.node_id} is draining")
        return error, outcome == "retry"

    def next_deadline(self) -> float | None:
        return self._connector.next_deadline()

    def transfers(self) -> TransferCounts:
        return self._connector.counts()

    def live(self) -> tuple[LiveTransfer, ...]:
        return self._connector.live()

    def on_give_back(self, job: ActiveJob) -> None:
        self._connector.leave(job.key)

    def ends_soon(self, job: ActiveJob) -> bool:
        return False

    @abstractmethod
    def _on_event(self, active: ActiveJob, event: HandoffEvent) -> None:
        """The hand-off of this job got somewhere."""

    @abstractmethod
    def on_started(self, job: ActiveJob) -> None: ...

    @abstractmethod
    def on_update(self, job: ActiveJob, update: RequestUpdate) -> None: ...

    @abstractmethod
    def on_cancel(self, job: ActiveJob) -> None: ...

    @abstractmethod
    def num_intake(self) -> int: ...
