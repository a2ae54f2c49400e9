from __future__ import annotations

from typing import Any

import pytest

from engine import Engine, StepResult
from protocol import KVConnectorOutput
from scheduler import ModelRunnerOutput, SchedulerOutput


class Recorder:
    """Scheduler, runner and connector in one: who was called, in which order, with what."""

    saves_layers = False

    def __init__(self, transfers: KVConnectorOutput | None = None) -> None:
        self.calls: list[str] = []
        self.transfers = transfers or KVConnectorOutput()
        self.step = SchedulerOutput(kv_connector_metadata="orders")
        self.updated_with: ModelRunnerOutput | None = None

    def schedule(self) -> SchedulerOutput:
        self.calls.append("schedule")
        return self.step

    def start_load_kv(self, meta: object) -> None:
        assert meta == "orders"
        self.calls.append("start_load_kv")

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert step is self.step
        self.calls.append("execute")
        return ModelRunnerOutput({"r": [7]})

    def wait_for_save(self) -> None:
        self.calls.append("wait_for_save")

    def get_finished(self) -> KVConnectorOutput:
        self.calls.append("get_finished")
        return self.transfers

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Any]:
        assert step is self.step
        self.calls.append("update_from_output")
        self.updated_with = output
        return []


def make_engine(recorder: Recorder, *, connected: bool) -> Engine:
    parts: Any = recorder
    return Engine(parts, parts, parts if connected else None)


def test_bytes_travel_while_the_step_is_computed() -> None:
    recorder = Recorder(KVConnectorOutput(finished_sending=("a",)))
    result = make_engine(recorder, connected=True).step()
    assert recorder.calls == [
        "schedule",
        "start_load_kv",
        "execute",
        "wait_for_save",
        "get_finished",
        "update_from_output",
    ]
    assert recorder.updated_with == ModelRunnerOutput({"r": [7]}, recorder.transfers)
    assert result == StepResult(recorder.step, [], recorder.transfers, result.execute_s)


def test_without_a_connector() -> None:
    recorder = Recorder()
    result = make_engine(recorder, connected=False).step()
    assert recorder.calls == ["schedule", "execute", "update_from_output"]
    assert recorder.updated_with == ModelRunnerOutput({"r": [7]})
    assert not result.transfers


@pytest.mark.parametrize(
    ("result", "progressed"),
    [
        (StepResult(SchedulerOutput(), [], KVConnectorOutput()), False),
        (StepResult(SchedulerOutput(num_scheduled_tokens={"r": 1}), [], KVConnectorOutput()), True),
        (StepResult(SchedulerOutput(), [object()], KVConnectorOutput()), True),  # type: ignore[list-item]
        (StepResult(SchedulerOutput(), [], KVConnectorOutput(finished_recving={"r": ()})), True),
        (StepResult(SchedulerOutput(), [], KVConnectorOutput(finished_sending=("r",))), True),
    ],
)
def test_whether_another_step_is_worth_while(result: StepResult, progressed: bool) -> None:
    assert result.progressed == progressed
