"""What is recorded replays with no difference: random lives, all settings, odd orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import msgspec
import pytest

from protocol import ConfigError, KVConnectorOutput, RequestView, SamplingParams, StepView
from scheduler import (
    CacheConfig,
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
)
from scheduler.observation import AFTER_DEFAULTS, EXPECT_DEFAULTS
from scheduler.recording import RecordingScheduler, trace_config
from scheduler.replay import cache_config, scheduler_config
from scheduler.trace import RunnerResult, Trace, TraceStep, parse_trace
from tests.scheduler.recordings import MemoryFile, check_replays, recorded_trace
from tests.scheduler.test_random_life import random_world

BLOCK = 4


class TestRandomLives:
    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("seed", range(40))
    def test_a_life_replays(self, seed: int, in_flight: int) -> None:
        check_replays(recorded_trace(random_world(seed, in_flight=in_flight)))

    def test_they_have_all_that_can_be_recorded(self) -> None:
        seen: Counter[str] = Counter()
        for in_flight, seed in [(n, seed) for n in (1, 2) for seed in range(40)]:
            trace = recorded_trace(random_world(seed, in_flight=in_flight))
            added: Counter[str] = Counter()
            for step in trace.steps:
                seen.update(name for name, value in msgspec.structs.asdict(step).items() if value)
                if step.runner is not None:
                    runner = msgspec.structs.asdict(step.runner)
                    seen.update(f"runner.{name}" for name, value in runner.items() if value)
                seen.update(
                    f"expect.{name}" for name, value in (step.expect or {}).items() if value
                )
                seen.update(f"after.{name}" for name, value in (step.after or {}).items() if value)
                seen["recving with tokens"] += bool(
                    step.runner and isinstance(step.runner.finished_recving, dict)
                )
                seen["results later"] += step.expect is not None and step.runner is None
                seen["only results"] += step.expect is None and step.runner is not None
                added.update(request.id for request in step.add)
            seen["id used again"] += max(added.values(), default=0) > 1
        elsewhere = {"ended_as", "draft_token_ids"}  # TestOddOrders
        assert set(TraceStep.__struct_fields__) - elsewhere <= seen.keys()
        reading = {"runner.invalid_blocks"}
        assert {
            f"runner.{name}" for name in RunnerResult.__struct_fields__
        } - reading <= seen.keys()
        assert {f"expect.{name}" for name in EXPECT_DEFAULTS} <= seen.keys()
        assert {f"after.{name}" for name in AFTER_DEFAULTS} <= seen.keys()
        for what in ("recving with tokens", "results later", "only results", "id used again"):
            assert seen[what] > 1, what


def other_config() -> SchedulerConfig:
    """No knob as it is by default, but for drafts, which go with none of the rest."""
    return SchedulerConfig(
        max_num_seqs=3,
        max_num_batched_tokens=65,
        max_num_scheduled_tokens=60,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=20,
        max_num_partial_prefills=4,
        max_long_partial_prefills=2,
        policy="priority",
        waiting_preempts_running=True,
        scheduler_reserve_full_isl=False,
        max_parked_blocks=7,
        kv_load_failure_policy="fail",
        max_loras=2,
        async_scheduling=False,
        max_model_len=64,
    )


def test_a_trace_has_all_settings() -> None:
    config = other_config()
    drafts = replace(config, spec_method="eagle", num_speculative_tokens=3)
    unchunked = replace(
        config, enable_chunked_prefill=False, max_num_partial_prefills=None,
        max_long_partial_prefills=None, max_num_scheduled_tokens=None,
    )  # fmt: skip
    cache = CacheConfig(num_blocks=9, block_size=8, hash_block_size=4, enable_prefix_caching=False)
    tried = (SchedulerConfig(), config, drafts, unchunked)
    for one in tried:
        written = msgspec.json.encode(trace_config(one, cache, kv_connector=True))
        trace = parse_trace(b'{"config":' + written + b',"steps":[]}')
        assert scheduler_config(trace.config) == one
        assert cache_config(trace.config) == cache
    for knob in fields(SchedulerConfig):
        assert len({getattr(one, knob.name) for one in tried}) > 1, knob.name


# ------------------------------------------------------------------------------ in odd orders


@dataclass
class Keeping:
    """Keeps the blocks of some requests that ended, and gives them up when asked to."""

    keep: set[str] = field(default_factory=set)
    pins: list[str] = field(default_factory=list)
    fails: bool = False

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.fails:
            raise RuntimeError("the connector is broken")
        return 0, False

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, step: StepView) -> object: ...

    def update_connector_output(self, output: KVConnectorOutput) -> None: ...

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        if request.request_id in self.keep:
            self.pins.append(request.request_id)
        return request.request_id in self.keep

    def revoke_pin(self) -> str | None:
        return self.pins.pop() if self.pins else None

    def revoke_reservation(self, request_id: str) -> bool:
        return False


class Recording:
    """A scheduler that records into memory."""

    def __init__(
        self, connector: Keeping | None = None, *, num_blocks: int = 30, **knobs: object
    ) -> None:
        self.stream = MemoryFile()
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | knobs
        self.scheduler = RecordingScheduler(
            SchedulerConfig(**settings),  # type: ignore[arg-type]
            CacheConfig(num_blocks=num_blocks + 1, block_size=BLOCK, hash_block_size=BLOCK),
            connector,
            stream=self.stream,
        )

    def add(self, name: str, length: int = 6, max_tokens: int = 8, **more: object) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        prompt = [len(name) * 100 + position for position in range(length)]
        self.scheduler.add_request(
            Request(name, prompt, sampling, hash_block_size=BLOCK, **more)  # type: ignore[arg-type]
        )

    def abort(self, name: str, status: RequestStatus = RequestStatus.FINISHED_ABORTED) -> None:
        self.scheduler.finish_requests([name], status)

    def finish(self, step: SchedulerOutput, *samplers: str, token: int = 7) -> None:
        sampled = {request_id: [token] for request_id in samplers}
        self.scheduler.update_from_output(step, ModelRunnerOutput(sampled))

    def step(self, *samplers: str) -> None:
        self.finish(self.scheduler.schedule(), *samplers)

    def end(self) -> Trace:
        """Replays with no difference."""
        self.scheduler.check_integrity()
        self.scheduler.close()
        trace = parse_trace(self.stream.content)
        check_replays(trace)
        return trace


class TestOddOrders:
    def test_calls_between_a_step_and_its_results(self) -> None:
        recording = Recording()
        recording.add("a")
        step = recording.scheduler.schedule()
        recording.abort("a")
        recording.add("b")
        recording.scheduler.reset_prefix_cache()
        recording.abort("b")
        recording.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        recording.finish(step, "a")
        recording.step()
        trace = recording.end()
        assert [s.abort_during for s in trace.steps] == [["a"], [], [], []]
        assert trace.steps[2].runner is not None
        assert [s.expect is not None for s in trace.steps] == [True, False, False, True]

    def test_an_id_that_is_used_again_at_once(self) -> None:
        recording = Recording()
        for length in (6, 9, 3):
            recording.add("a", length)
            recording.abort("a")
        recording.add("a", 5)
        recording.step("a")
        trace = recording.end()
        assert sum(len(s.add) for s in trace.steps) == 4
        assert trace.steps[-1].expect is not None
        assert trace.steps[-1].expect["finished_req_ids"] == ["a", "a", "a"]

    @pytest.mark.parametrize("ahead", [False, True])
    def test_an_id_that_is_used_again_while_its_step_runs(self, ahead: bool) -> None:
        recording = Recording()
        recording.add("a", max_tokens=3)
        before = recording.scheduler.schedule()
        recording.abort("a")
        recording.add("a", 10, max_tokens=1)
        if ahead:
            later = recording.scheduler.schedule()
            recording.finish(before, "a", token=11)
        else:
            recording.finish(before, "a", token=11)
            later = recording.scheduler.schedule()
        recording.finish(later, "a", token=12)
        trace = recording.end()
        emitted = [s.after.get("emitted") for s in trace.steps if s.after is not None]
        assert emitted == [{"a": []}, None]
        assert trace.steps[-1].after is not None
        assert trace.steps[-1].after["finished"] == {"a": "length"}

    def test_an_id_that_is_used_again_when_its_pin_is_given_up(self) -> None:
        connector = Keeping(keep={"a"})
        recording = Recording(connector, num_blocks=4)
        recording.add("a", 8, max_tokens=1)
        recording.step("a")
        recording.add("bb", 12)
        recording.step("bb")
        connector.keep.clear()
        recording.add("a", 9)
        recording.abort("bb")
        recording.step("a")
        trace = recording.end()
        assert [s.kept for s in trace.steps] == [["a"], [], []]
        assert [s.revoked for s in trace.steps] == [[], ["a"], []]

    def test_a_reset_stands_between_what_came_before_and_after_it(self) -> None:
        recording = Recording(num_blocks=6)
        recording.add("a")
        recording.add("bb")
        recording.step("a", "bb")
        assert not recording.scheduler.reset_prefix_cache()
        recording.abort("a")
        recording.scheduler.reset_prefix_cache(reset_running_requests=True)
        recording.abort("bb")
        assert recording.scheduler.reset_prefix_cache()
        recording.add("a")
        recording.step("a")
        trace = recording.end()
        assert [s.reset for s in trace.steps] == [None, False, True, False, None]

    def test_errors_are_no_aborts(self) -> None:
        recording = Recording(Keeping(keep={"a", "bb"}))
        for name in ("a", "bb", "ccc"):
            recording.add(name)
        recording.step("a", "bb", "ccc")
        recording.abort("a", RequestStatus.FINISHED_ERROR)
        step = recording.scheduler.schedule()
        recording.abort("bb", RequestStatus.FINISHED_ERROR)
        recording.abort("ccc")
        recording.finish(step)
        recording.step()
        trace = recording.end()
        last = trace.steps[-1].expect
        assert trace.steps[1].ended_as == {"a": "FINISHED_ERROR", "bb": "FINISHED_ERROR"}
        assert last is not None
        assert last["status"] == {"a": "FINISHED_ERROR", "bb": "FINISHED_ERROR"}

    def test_drafts_at_any_time(self) -> None:
        recording = Recording(spec_method="ngram", num_speculative_tokens=2, async_scheduling=False)
        update = recording.scheduler.update_draft_token_ids
        recording.add("a")
        recording.step("a")
        update({"a": [1, 2]})
        update({"a": [3]})
        recording.add("bb")
        update({"a": [4]})
        step = recording.scheduler.schedule()
        update({"a": [5, 6]})
        recording.finish(step, "a", "bb")
        recording.step("a", "bb")
        trace = recording.end()
        assert trace.steps[0].runner is not None
        assert trace.steps[0].runner.draft == {"a": [1, 2]}
        assert [s.draft_token_ids for s in trace.steps if s.draft_token_ids] == [
            {"a": [3]}, {"a": [4]}, {"a": [5, 6]},
        ]  # fmt: skip
        drafted = [s.expect.get("scheduled_spec_tokens") for s in trace.steps if s.expect]
        assert drafted == [None, {"a": [4]}, {"a": [5, 6]}]

    def test_a_node_that_waits_for_grammars_and_is_paused(self) -> None:
        recording = Recording()
        recording.add("a", awaits_grammar=True)
        recording.scheduler.grammar_ready("nobody")
        recording.scheduler.set_pause_state(PauseState.UNPAUSED)  # as it is
        recording.step()
        recording.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        recording.scheduler.grammar_ready("a")
        recording.step()
        recording.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        recording.scheduler.set_pause_state(PauseState.UNPAUSED)
        recording.step("a")
        trace = recording.end()
        assert [s.pause for s in trace.steps] == [None, "PAUSED_ALL", "UNPAUSED"]
        assert [s.grammar_ready for s in trace.steps] == [[], ["a"], []]

    def test_the_last_step_may_have_no_results(self) -> None:
        recording = Recording()
        recording.add("a")
        first = recording.scheduler.schedule()
        recording.scheduler.schedule()
        recording.finish(first, "a")
        trace = recording.end()
        assert [s.runner is not None for s in trace.steps] == [False, True]

    def test_what_is_refused_is_not_recorded(self) -> None:
        recording = Recording(num_blocks=4)
        with pytest.raises(ConfigError):
            Recording(policy="lottery")
        with pytest.raises(Exception, match="at most 16"):
            recording.add("a", 17)
        recording.abort("nobody")
        assert recording.end().steps == []

    def test_a_step_that_raises_is_the_last(self) -> None:
        connector = Keeping()
        recording = Recording(connector)
        recording.add("a")
        recording.step("a")
        recording.add("bb")
        connector.fails = True
        with pytest.raises(RuntimeError):
            recording.scheduler.schedule()
        trace = parse_trace(recording.stream.getvalue())
        assert [added.id for added in trace.steps[-1].add] == ["bb"]
        assert trace.steps[-1].expect == {}
        recording.scheduler.close()
