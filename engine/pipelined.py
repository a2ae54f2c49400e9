"""Asynchronous scheduling: step n+1 is planned while step n is computed.

    engine's thread   plan n+1 │ messages … │ begin n+1 │ results of n, deltas │ plan n+2 │ …
    runner's thread   ───── compute n ──────┤           ├───────────── compute n+1 ──────────

The runner is not idle while results are told and the next step is planned, and the engine's thread
serves transfers while it waits for the runner. The tokens are those of synchronous scheduling: the
runner, which computes in order, has every token by the time it needs it.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from engine.loop import ComputedStep, Engine, OnScheduled, StepResult, StepRunner
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
    """An engine with at most one step in the runner's thread."""

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
        self._in_flight: _StepInFlight | None = None

    def step(self, on_scheduled: OnScheduled | None = None) -> StepResult:
        """Plan a step, and return what the one before gave."""
        before = self._in_flight
        if before is not None and before.overlaps:
            scheduled = self.scheduler.schedule()
            computed = self._wait(before)
            self._save()
            in_flight = self._launch(scheduled, on_scheduled)
            return self._finish(computed, in_flight=in_flight)
        # Nothing to overlap with: what the step before gave counts before the next is planned.
        result = _NOTHING if before is None else self._finish_at_once(before)
        in_flight = self._launch(self.scheduler.schedule(), on_scheduled)
        return replace(result, in_flight=in_flight)

    def close(self) -> None:
        self._executor.shutdown()

    def _finish_at_once(self, step: _StepInFlight) -> StepResult:
        computed = step.future.result()
        self._save()
        return self._finish(computed)

    def _launch(self, scheduled: SchedulerOutput, on_scheduled: OnScheduled | None) -> bool:
        """Whether there is something to compute."""
        self._begin(scheduled, on_scheduled)
        future = self._executor.submit(self._compute, scheduled)
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
