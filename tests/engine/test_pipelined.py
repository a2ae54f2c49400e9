"""A step is planned while the one before is computed, and nothing else changes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine import PipelinedEngine
from kv_transfer import BaseConnector
from protocol import KVConnectorOutput, SamplingParams
from scheduler import CacheConfig, ModelRunnerOutput, Request, Scheduler, SchedulerConfig
from scheduler import SchedulerOutput as Step
from tests.hash_model import HashRunner, expected_tokens, hash_kv_cache, prompt_of

TIMEOUT_S = 20.0
KV_CACHE = hash_kv_cache(65)


class GatedRunner(HashRunner):
    """Computes a step when it is let, and says that it has begun."""

    def __init__(self) -> None:
        super().__init__(KV_CACHE)
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.computed: list[Step] = []

    def execute(self, step: Step) -> ModelRunnerOutput:
        if step.num_scheduled_tokens:
            self.begun.release()
            assert self.gate.acquire(timeout=TIMEOUT_S)
        self.computed.append(step)
        return super().execute(step)


class WatchedScheduler(Scheduler):
    """Counts the steps that it planned."""

    num_planned = 0

    def schedule(self) -> Step:
        self.num_planned += 1
        return super().schedule()


class IdleConnector:
    """Has nothing to move; counts how often it is looked at."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.polled = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, object] = {
            "get_num_new_matched_tokens": (0, False),
            "request_finished": False,
            "get_finished": KVConnectorOutput(),
        }

        def call(*_: object) -> object:
            self.calls.append(name)
            return answers.get(name)

        return call

    def poll(self) -> None:
        self.calls.append("poll")
        self.polled.release()


def make_scheduler() -> WatchedScheduler:
    return WatchedScheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), CacheConfig(num_blocks=65)
    )


def request(name: str, max_tokens: int) -> Request:
    return Request(name, prompt_of(20), SamplingParams(max_tokens=max_tokens))


@pytest.fixture
def gated() -> Iterator[tuple[PipelinedEngine, GatedRunner]]:
    runner = GatedRunner()
    engine = PipelinedEngine(make_scheduler(), runner)
    yield engine, runner
    runner.gate.release(100)
    engine.close()


def test_a_step_is_planned_while_the_one_before_is_computed(
    gated: tuple[PipelinedEngine, GatedRunner],
) -> None:
    engine, runner = gated
    scheduler = engine.scheduler
    assert isinstance(scheduler, WatchedScheduler)
    scheduler.add_request(request("a", 4))
    first = engine.step()
    assert first.in_flight
    assert runner.begun.acquire(timeout=TIMEOUT_S)
    round_ = threading.Thread(target=engine.step)
    round_.start()
    deadline = time.monotonic() + TIMEOUT_S
    while scheduler.num_planned < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert runner.computed == []  # the first step still runs
    assert scheduler.requests["a"].output_token_ids == []  # its token is not known
    assert scheduler.requests["a"].num_computed_tokens == 21  # and will be computed next
    runner.gate.release()
    round_.join(TIMEOUT_S)
    assert len(scheduler.requests["a"].output_token_ids) == 1
    runner.gate.release(100)


def test_results_that_are_there_count_before_the_next_step_is_planned(
    gated: tuple[PipelinedEngine, GatedRunner],
) -> None:
    """A request that arrives at an engine that is idle does not wait for a round."""
    engine, runner = gated
    runner.gate.release(100)
    engine.scheduler.add_request(request("a", 1))
    assert engine.step().in_flight
    engine._in_flight.future.result(TIMEOUT_S)  # type: ignore[union-attr]
    result = engine.step()
    assert [update.finished for update in result.updates] == [True]
    assert not result.in_flight
    assert result.scheduled.num_scheduled_tokens == {"a": 20}


def test_no_step_is_planned_for_a_request_that_surely_ends(
    gated: tuple[PipelinedEngine, GatedRunner],
) -> None:
    engine, runner = gated
    engine.scheduler.add_request(request("a", 1))
    engine.step()
    runner.gate.release()
    result = engine.step()
    assert not result.in_flight
    assert [update.finished for update in result.updates] == [True]


def test_the_tokens_are_those_of_an_undisturbed_run() -> None:
    sampling = SamplingParams(max_tokens=30)
    engine = PipelinedEngine(make_scheduler(), HashRunner(KV_CACHE, step_s=0.001))
    prompts = {f"r{n}": prompt_of(10 + 25 * n, n) for n in range(6)}
    for name, prompt in prompts.items():
        engine.scheduler.add_request(Request(name, prompt, sampling))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.scheduler.has_requests():
        for update in engine.step().updates:
            tokens[update.request.request_id] += update.new_token_ids
        engine.scheduler.check_integrity()
    engine.close()
    assert tokens == {name: expected_tokens(prompt, sampling) for name, prompt in prompts.items()}


def test_transfers_are_served_while_a_step_is_computed() -> None:
    connector = IdleConnector()
    runner = GatedRunner()
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=65), connector)
    engine = PipelinedEngine(scheduler, runner, connector)
    scheduler.add_request(request("a", 3))
    engine.step()
    round_ = threading.Thread(target=engine.step)
    round_.start()
    try:
        engine.activity.set()  # a message has come
        assert connector.polled.acquire(timeout=TIMEOUT_S)
        assert runner.computed == []
    finally:
        runner.gate.release(100)
        round_.join(TIMEOUT_S)
        engine.close()


def test_orders_of_a_step_are_carried_out_when_the_one_before_has_been_computed() -> None:
    connector = IdleConnector()
    runner = GatedRunner()
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=65), connector)
    engine = PipelinedEngine(scheduler, runner, connector)
    scheduler.add_request(request("a", 3))
    engine.step()
    assert connector.calls.count("start_load_kv") == 1
    round_ = threading.Thread(target=engine.step)
    round_.start()
    deadline = time.monotonic() + TIMEOUT_S
    while connector.calls.count("build_connector_meta") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert connector.calls.count("start_load_kv") == 1  # planned, but the first step still runs
    runner.gate.release(100)
    round_.join(TIMEOUT_S)
    assert connector.calls.count("start_load_kv") == 2
    engine.close()


def test_no_step_begins_before_the_one_before_is_saved() -> None:
    class Saving(BaseConnector):
        def start_load_kv(self, meta: object) -> None:
            calls.append("begin")

        def wait_for_save(self) -> None:
            calls.append("save")

    class Runner(HashRunner):
        def execute(self, step: Step) -> ModelRunnerOutput:
            output = super().execute(step)
            calls.append("computed")
            return output

    calls: list[str] = []
    connector = Saving()
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=65), connector)
    engine = PipelinedEngine(scheduler, Runner(KV_CACHE, step_s=0.005), connector)
    scheduler.add_request(request("a", 10))
    overlapped = []
    while scheduler.has_requests():
        overlapped.append(engine.step().in_flight)
    engine.close()
    assert sum(overlapped) >= 9
    num_steps = calls.count("save")
    assert num_steps >= 10
    assert calls[: 3 * num_steps] == ["begin", "computed", "save"] * num_steps


def test_an_empty_step_wakes_nobody() -> None:
    """Else the end of each idle step would be the reason for another one."""
    engine = PipelinedEngine(make_scheduler(), HashRunner(KV_CACHE))
    for _ in range(3):
        result = engine.step()
        assert not result.progressed
        engine._in_flight.future.result(TIMEOUT_S)  # type: ignore[union-attr]
        assert not engine.activity.is_set()
    engine.close()


def test_a_model_that_breaks_is_noticed_by_the_next_round() -> None:
    class Broken(HashRunner):
        def execute(self, step: Step) -> ModelRunnerOutput:
            raise RuntimeError("broken")

    engine = PipelinedEngine(make_scheduler(), Broken(KV_CACHE))
    engine.scheduler.add_request(request("a", 3))
    engine.step()
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    engine.close()
    assert not [t for t in threading.enumerate() if "runner" in t.name]


class QueuedHandle:
    """A step that the device computes when it is let."""

    def __init__(self, compute: Callable[[], ModelRunnerOutput]) -> None:
        self.gate = threading.Semaphore(0)
        self._compute = compute

    def result(self) -> ModelRunnerOutput:
        assert self.gate.acquire(timeout=TIMEOUT_S)
        return self._compute()


class QueuedRunner(HashRunner):
    """Takes steps on at once; the device computes them in order when their results are read."""

    def __init__(self) -> None:
        super().__init__(KV_CACHE)
        self.launched: queue.Queue[QueuedHandle] = queue.Queue()
        self.num_launched = 0

    def launch(self, step: Step) -> QueuedHandle:
        handle = QueuedHandle(lambda: super(QueuedRunner, self).execute(step))
        self.num_launched += 1
        if step.num_scheduled_tokens:
            self.launched.put(handle)
        else:
            handle.gate.release()  # nothing to do takes no time
        return handle


def let_all(runner: QueuedRunner) -> threading.Thread:
    """A device that computes whatever comes, until None does."""

    def compute() -> None:
        while (handle := runner.launched.get(timeout=TIMEOUT_S)) is not None:
            handle.gate.release()

    thread = threading.Thread(target=compute)
    thread.start()
    return thread


def launched_ahead(connector: Any = None) -> int:
    """How many steps are launched while the device has computed none of them."""
    runner = QueuedRunner()
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=65), connector)
    engine = PipelinedEngine(scheduler, runner, connector)
    scheduler.add_request(request("a", 3))
    engine.step()
    first = runner.launched.get(timeout=TIMEOUT_S)
    round_ = threading.Thread(target=engine.step)
    round_.start()
    try:
        second = runner.launched.get(timeout=TIMEOUT_S if connector is None else 0.2)
    except queue.Empty:
        return 1
    else:
        second.gate.release()
        return 2
    finally:
        first.gate.release()
        rest = let_all(runner)
        round_.join(TIMEOUT_S)
        engine.close()
        runner.launched.put(None)  # type: ignore[arg-type]
        rest.join(TIMEOUT_S)


class Overlapping(BaseConnector):
    """Has nothing to do between two steps; notes when it is told of one."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def steps_may_overlap(self) -> bool:
        return True

    def start_load_kv(self, meta: object) -> None:
        self.calls.append("begin")

    def wait_for_save(self) -> None:
        self.calls.append("save")


def test_a_device_with_a_queue_has_the_next_step_before_it_has_computed_this_one() -> None:
    assert launched_ahead() == 2
    connector = Overlapping()
    assert launched_ahead(connector) == 2


def test_no_step_is_launched_ahead_of_what_has_to_be_done_between_two() -> None:
    class Saving(BaseConnector):
        def wait_for_save(self) -> None:
            pass

    class Loading(BaseConnector):
        def start_load_kv(self, meta: object) -> None:
            pass

    class Layers(BaseConnector):
        def save_kv_layer(self, layer: int) -> None:
            pass

    for connector in (Saving(), Loading(), Layers()):
        assert not connector.steps_may_overlap
        assert launched_ahead(connector) == 1
    assert BaseConnector().steps_may_overlap


def test_a_step_begins_for_the_connector_when_the_one_before_has_been_computed() -> None:
    connector, runner = Overlapping(), QueuedRunner()
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_blocks=65), connector)
    engine = PipelinedEngine(scheduler, runner, connector)
    scheduler.add_request(request("a", 3))
    engine.step()
    first = runner.launched.get(timeout=TIMEOUT_S)
    round_ = threading.Thread(target=engine.step)
    round_.start()
    second = runner.launched.get(timeout=TIMEOUT_S)
    assert connector.calls == ["begin"]  # the second is launched, but the first still runs
    first.gate.release()
    round_.join(TIMEOUT_S)
    assert connector.calls == ["begin", "save", "begin"]
    second.gate.release()
    engine.close()


@pytest.mark.parametrize("connected", [False, True])
def test_the_tokens_of_steps_that_are_launched_ahead_are_right(connected: bool) -> None:
    """Of few blocks, so that requests are preempted; a step takes until the next one is planned."""
    sampling = SamplingParams(max_tokens=30)
    connector = Overlapping() if connected else None
    runner = QueuedRunner()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        CacheConfig(num_blocks=14),
        connector,
    )
    decisions: list[tuple[bool, bool]] = []  # of each step: whether it preempts, and runs ahead

    class Watched(PipelinedEngine):
        def _may_launch_ahead(self, scheduled: Step) -> bool:
            ahead = super()._may_launch_ahead(scheduled)
            decisions.append((bool(scheduled.preempted_req_ids), ahead))
            runner.launched.get(timeout=TIMEOUT_S).gate.release()  # the step before
            return ahead

    engine = Watched(scheduler, runner, connector)
    prompts = {f"r{n}": prompt_of(10 + 25 * n, n) for n in range(6)}
    for name, prompt in prompts.items():
        scheduler.add_request(Request(name, prompt, sampling))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while scheduler.has_requests():
        for update in engine.step().updates:
            tokens[update.request.request_id] += update.new_token_ids
        scheduler.check_integrity()
    rest = let_all(runner)  # a step that was planned in vain
    engine.close()
    runner.launched.put(None)  # type: ignore[arg-type]
    rest.join(TIMEOUT_S)
    assert tokens == {name: expected_tokens(prompt, sampling) for name, prompt in prompts.items()}
    # The connector may still read the blocks of a request that is preempted.
    assert {ahead for preempts, ahead in decisions if preempts} == {not connected}
    assert (False, True) in decisions
    assert not [t for t in threading.enumerate() if "runner" in t.name or "reader" in t.name]


def test_a_device_that_breaks_is_noticed_by_the_next_round() -> None:
    class Broken(QueuedRunner):
        def launch(self, step: Step) -> QueuedHandle:
            raise RuntimeError("broken")

    engine = PipelinedEngine(make_scheduler(), Broken())
    engine.scheduler.add_request(request("a", 3))
    engine.step()
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    engine.close()
