"""The engine: schedule → run → update, one step at a time. It knows no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from kv_transfer import KVConnector
from protocol import KVConnectorOutput
from scheduler import ModelRunnerOutput, RequestUpdate, Scheduler, SchedulerOutput

OnScheduled = Callable[[SchedulerOutput], None]
OnLayer = Callable[[int], None]


class StepRunner(Protocol):
    """What computes a step: a model, or something that takes its time without one."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens, and sample after those that are the last of a request.

        Steps come in the order in which they were planned. With asynchronous scheduling a token to
        compute may be the one that was sampled by the step before, which the scheduler did not
        know yet: the runner appends what it samples to its own copy of the request.
        """


@runtime_checkable
class LayeredRunner(StepRunner, Protocol):
    """A runner that can say how far it is in a step. It need not: then it is a `StepRunner` only.

    `on_layer` is called with the number of each layer, in order, when the keys and values of all
    tokens of the step are written; by the thread that computes. None: nobody wants to know.
    """

    on_layer: OnLayer | None


class StepHandle(Protocol):
    """A step that has been launched on a device, and is computed there."""

    def result(self) -> ModelRunnerOutput:
        """Wait until it has been computed. Called once, by whichever thread may wait."""


@runtime_checkable
class LaunchingRunner(StepRunner, Protocol):
    """A runner whose device has a queue: it takes on a step while the one before is computed.

    `execute` is `launch(step).result()`. Steps are computed in the order in which they were
    launched, and a token that one samples is there, on the device, for the next. If the runner is
    a `LayeredRunner` too, `on_layer` is called within `result`, by the thread that waits there.
    """

    def launch(self, step: SchedulerOutput) -> StepHandle:
        """Queue a step, without waiting for what is queued before it."""


@dataclass(frozen=True)
class ComputedStep:
    """What came out of a step."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    execute_s: float


@dataclass(frozen=True)
class StepResult:
    """What a step decided and what came of it."""

    scheduled: SchedulerOutput
    updates: Sequence[RequestUpdate]
    transfers: KVConnectorOutput
    execute_s: float = 0.0
    in_flight: bool = False  # a step with tokens was planned since, and runs

    @property
    def progressed(self) -> bool:
        """Whether another step might find something to do at once."""
        scheduled = self.scheduled
        return bool(
            scheduled.num_scheduled_tokens or self.updates or self.transfers or self.in_flight
        )


class Engine:
    """A scheduler, a runner and, if KV moves, a connector.

    `activity` is to be set by whoever wants the engine's thread to look at something.
    """

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, connector: KVConnector | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.connector = connector
        self.activity = threading.Event()
        if connector is not None and connector.saves_layers and isinstance(runner, LayeredRunner):
            runner.on_layer = connector.save_kv_layer

    def step(self, on_scheduled: OnScheduled | None = None) -> StepResult:
        """Bytes of earlier steps travel while this one is computed."""
        scheduled = self.scheduler.schedule()
        self._begin(scheduled, on_scheduled)
        computed = self._compute(scheduled)
        self._save()
        return self._finish(computed)

    def close(self) -> None:
        """Returns when nothing is computed any more."""

    def _begin(self, scheduled: SchedulerOutput, on_scheduled: OnScheduled | None) -> None:
        """All earlier steps have been computed: transfers may rely on it from here on."""
        if self.connector is not None:
            self.connector.start_load_kv(scheduled.kv_connector_metadata)
        if on_scheduled is not None:
            on_scheduled(scheduled)

    def _compute(self, scheduled: SchedulerOutput) -> ComputedStep:
        began = time.perf_counter()
        output = self.runner.execute(scheduled)
        return ComputedStep(scheduled, output, time.perf_counter() - began)

    def _save(self) -> None:
        """A step has been computed, and the next one must not overwrite what is to be saved."""
        if self.connector is not None:
            self.connector.wait_for_save()

    def _finish(self, step: ComputedStep, *, in_flight: bool = False) -> StepResult:
        output, transfers = step.output, KVConnectorOutput()
        if self.connector is not None:
            transfers = self.connector.get_finished()
            output = replace(output, kv_connector_output=transfers)
        updates = self.scheduler.update_from_output(step.scheduled, output)
        return StepResult(step.scheduled, updates, transfers, step.execute_s, in_flight)
