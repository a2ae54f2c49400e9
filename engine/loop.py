"""The engine: schedule → run → update, one step at a time. It knows no torch and no threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer import KVConnector
from protocol import KVConnectorOutput
from scheduler import ModelRunnerOutput, RequestUpdate, Scheduler, SchedulerOutput


class StepRunner(Protocol):
    """What computes a step: a model, or something that takes its time without one."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens, and sample after those that are the last of a request."""


@dataclass(frozen=True)
class StepResult:
    """What a step decided and what came of it."""

    scheduled: SchedulerOutput
    updates: Sequence[RequestUpdate]
    transfers: KVConnectorOutput

    @property
    def progressed(self) -> bool:
        """Whether another step might find something to do at once."""
        scheduled = self.scheduled
        return bool(scheduled.num_scheduled_tokens or self.updates or self.transfers)


class Engine:
    """A scheduler, a runner and, if KV moves, a connector."""

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, connector: KVConnector | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.connector = connector

    def step(self, on_scheduled: Callable[[SchedulerOutput], None] | None = None) -> StepResult:
        """Bytes of earlier steps travel while this one is computed."""
        scheduled = self.scheduler.schedule()
        if self.connector is not None:
            self.connector.start_load_kv(scheduled.kv_connector_metadata)
        if on_scheduled is not None:
            on_scheduled(scheduled)
        output = self.runner.execute(scheduled)
        transfers = KVConnectorOutput()
        if self.connector is not None:
            transfers = self.connector.get_finished()
            output = ModelRunnerOutput(output.sampled_token_ids, transfers)
        updates = self.scheduler.update_from_output(scheduled, output)
        return StepResult(scheduled, updates, transfers)
