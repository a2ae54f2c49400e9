"""Asynchronous scheduling: step n+1 is planned while step n is computed.

    engine's thread   plan n+1 │ messages … │ begin n+1 │ results of n, deltas │ plan n+2 │ …
    runner's thread   ───── compute n ──────┤           ├───────────── compute n+1 ──────────

The runner is not idle while results are told and the next step is planned, and the engine's thread
serves transfers while it waits for the runner. The tokens are those of synchronous scheduling: the
runner, which computes in order, has every token by the time it needs it.

A device with a queue (`LaunchingRunner`) shall not be idle between two steps either, so the next
one is launched behind the one that it computes:

    engine's thread   plan n+1 │ messages ………………… │ begin n+1 │ results of n, deltas │ plan n+2 …
    runner's thread            │ launch n+1 │                                                 …
    device            ──────── compute n ───────────┤├────────────── compute n+1 ────────────────
    reader's thread   ──────── wait for n ──────────┤├────────────── wait for n+1 ───────────────

Then n+1 may be computed before it has begun for the connector. That is right where nothing has to
be loaded or saved in between (`KVConnector.steps_may_overlap`) and the step takes no blocks from a
preempted request, which the connector may still read until it is told. Loads are begun, and what a
step wrote is read, when the step before has been computed, as ever.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from engine.loop import (
    ComputedStep,
    Engine,
    LaunchingRunner,
    OnScheduled,
    StepHandle,
    StepResult,
    StepRunner,
)
from kv_transfer import KVConnector
from protocol import KVConnectorOutput
from scheduler import Scheduler, SchedulerOutput


@dataclass(frozen=True)
class _StepInFlight:
    scheduled: SchedulerOutput
    future: Future[ComputedStep]

    @property
    def overlaps(self) -> bool:
        """Whether it will take some more time: a step without tokens has as good as ended."""
        return bool(self.scheduled.num_scheduled_tokens) and not self.future.done()


_NOTHING = StepResult(SchedulerOutput(), (), KVConnectorOutput())


class PipelinedEngine(Engine):
    """An engine with at most one step in the runner's thread; a device may have one behind it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        connector: KVConnector | None = None,
        *,
        name: str = "engine",
        executor: Executor | None = None,
    ) -> None:
        """`executor` computes steps one by one, in order; by default a thread does."""
        super().__init__(scheduler, runner, connector)
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix=f"{name}-runner")
        self._device: _Device | None = None
        if isinstance(runner, LaunchingRunner):
            self._device = _Device(runner, self._executor, name)
        self._may_overlap = connector is None or connector.steps_may_overlap
        self._in_flight: _StepInFlight | None = None
        self.num_planned_ahead = 0  # steps, while the one before was computed

    def step(self, on_scheduled: OnScheduled | None = None) -> StepResult:
        """Plan a step, and return what the one before gave."""
        before = self._in_flight
        if before is not None and before.overlaps:
            scheduled = self.scheduler.schedule()
            self.num_planned_ahead += 1
            ahead = self._submit(scheduled) if self._may_launch_ahead(scheduled) else None
            computed = self._wait(before)
            self._save()
            in_flight = self._launch(scheduled, on_scheduled, ahead)
            return self._finish(computed, in_flight=in_flight)
        # Nothing to overlap with: what the step before gave counts before the next is planned.
        result = _NOTHING if before is None else self._finish_at_once(before)
        in_flight = self._launch(self.scheduler.schedule(), on_scheduled)
        return replace(result, in_flight=in_flight)

    def close(self) -> None:
        self._executor.shutdown()
        if self._device is not None:
            self._device.close()

    def _may_launch_ahead(self, scheduled: SchedulerOutput) -> bool:
        """Whether the step may be computed before it has begun for the connector."""
        if self._device is None or not scheduled.num_scheduled_tokens:
            return False
        return self._may_overlap and (self.connector is None or not scheduled.preempted_req_ids)

    def _submit(self, scheduled: SchedulerOutput) -> Future[ComputedStep]:
        if self._device is None:
            return self._executor.submit(self._compute, scheduled)
        return self._device.submit(scheduled)

    def _finish_at_once(self, step: _StepInFlight) -> StepResult:
        computed = step.future.result()
        self._save()
        return self._finish(computed)

    def _launch(
        self,
        scheduled: SchedulerOutput,
        on_scheduled: OnScheduled | None,
        ahead: Future[ComputedStep] | None = None,
    ) -> bool:
        """Begin a step, unless the runner has it already; whether there is something to compute."""
        self._begin(scheduled, on_scheduled)
        future = ahead or self._submit(scheduled)
        self._in_flight = _StepInFlight(scheduled, future)
        if not scheduled.num_scheduled_tokens:
            return False  # nobody waits for it: its end would wake an idle engine in vain
        future.add_done_callback(lambda _: self.activity.set())
        return True

    def _wait(self, step: _StepInFlight) -> ComputedStep:
        """Serve transfers until the step has been computed, which takes as long as it takes."""
        while not step.future.done():
            self.activity.wait()
            self.activity.clear()
            if self.connector is not None:
                self.connector.poll()
        return step.future.result()


class _Device:
    """Steps on a device with a queue: one thread launches them, another waits for their ends."""

    def __init__(self, runner: LaunchingRunner, launches: Executor, name: str) -> None:
        self._runner = runner
        self._launches = launches
        self._reads = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-reader")
        self._ended_at = 0.0  # when the last step had been computed

    def submit(self, scheduled: SchedulerOutput) -> Future[ComputedStep]:
        launched = self._launches.submit(self._launch, scheduled)
        return self._reads.submit(self._read, scheduled, launched)

    def close(self) -> None:
        self._reads.shutdown()

    def _launch(self, scheduled: SchedulerOutput) -> tuple[StepHandle, float]:
        began = time.perf_counter()
        return self._runner.launch(scheduled), began

    def _read(
        self, scheduled: SchedulerOutput, launched: Future[tuple[StepHandle, float]]
    ) -> ComputedStep:
        handle, began = launched.result()
        output = handle.result()
        began = max(began, self._ended_at)  # until then the device had the step before
        self._ended_at = time.perf_counter()
        return ComputedStep(scheduled, output, self._ended_at - began)
