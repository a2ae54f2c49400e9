"""A scheduler that writes down what it is told and what it decides, while it runs.

    caller ── add, abort, … ──► RecordingScheduler ─┬─► Scheduler
                                                    └─► TraceWriter: one line a step
    connector ◄── questions, answers noted ─────────

What happened is written in the order in which it happened, whether the results of a step come
before the next one is decided or after that. A `TraceStep` has a fixed order of its own, so one
that has no place for what happens next ends, and another begins: replayed in that order, the same
scheduler decides the same.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, BinaryIO, get_args

from protocol import KVConnectorOutput, RequestView, SchedulerConnector, StepView
from scheduler import observation
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler
from scheduler.state import PauseState
from scheduler.trace import (
    AddedRequest,
    EndName,
    RunnerResult,
    TraceConfig,
    TraceStep,
    TraceWriter,
)


class _Phase(enum.IntEnum):
    """How far a `TraceStep` is filled. What belongs to an earlier phase goes into the next one."""

    EMPTY = 0
    CALLS = 1  # whose order among each other does not matter
    RESET = 2
    DECIDED = 3
    PROCESSED = 4


class RecordingScheduler(Scheduler):
    """Decides what a `Scheduler` does, and records it. Close it at the end."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        connector: SchedulerConnector | None = None,
        *,
        stream: BinaryIO,
        name: str = "",
    ) -> None:
        noting = None if connector is None else _NotingConnector(connector)
        super().__init__(config, cache_config, noting)
        self._noting = noting
        self._trace_config = trace_config(config, cache_config, kv_connector=noting is not None)
        self._writer = TraceWriter(stream, self._trace_config, name)
        self._begin_step()

    def close(self) -> None:
        """Write what there is, and end the recording."""
        self._end_step()
        self._writer.close()

    # ------------------------------------------------------------------ the step that is written

    def _begin_step(self) -> None:
        self._step = TraceStep()
        self._phase = _Phase.EMPTY
        self._held: list[str] = []  # of `abort_during`
        if self._noting is not None:
            self._noting.step = self._step

    def _end_step(self) -> None:
        while self._step.revoked and self._step.revoked[-1] is None:
            self._step.revoked.pop()
        if self._step != TraceStep():
            self._writer.write(self._step)
        self._begin_step()

    def _enter(self, phase: _Phase, *, again: bool = False) -> TraceStep:
        """The step that has a place for something of this phase; `again`: for more of it."""
        if self._phase > phase or (self._phase is phase and not again):
            self._end_step()
        self._phase = phase
        return self._step

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.request_id in self._step.abort:
            self._end_step()  # an id that is used again
        self._enter(_Phase.CALLS, again=True).add.append(_added(request))

    def grammar_ready(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        awaits = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if request is not None and request.status is awaits:
            self._enter(_Phase.CALLS, again=True).grammar_ready.append(request_id)
        super().grammar_ready(request_id)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        during = self._phase is _Phase.DECIDED
        step = self._step if during else self._enter(_Phase.CALLS, again=True)
        ended = super().finish_requests(request_ids, status)
        ids = [request.request_id for request in ended]
        (step.abort_during if during else step.abort).extend(ids)
        if during:
            self._held += observation.held(self, ids)
        if status is not RequestStatus.FINISHED_ABORTED:
            step.ended_as.update(dict.fromkeys(ids, _end_name(status)))
        return ended

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state is not self.pause_state:
            self._enter(_Phase.CALLS, again=True).pause = pause_state.name  # type: ignore[assignment]
        super().set_pause_state(pause_state)

    def reconfigure(self, config: SchedulerConfig) -> None:
        assert config == self.config, "a recording has one configuration"

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        self._enter(_Phase.RESET).reset = reset_running_requests
        return super().reset_prefix_cache(reset_running_requests=reset_running_requests)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> SchedulerOutput:
        step = self._enter(_Phase.DECIDED)
        step.expect = {}
        loading = observation.loading(self)
        try:
            output = super().schedule()
        except BaseException:
            self._end_step()  # it can be replayed up to here
            raise
        step.expect = _without_defaults(
            observation.decision(self, output, loading_before=loading, aborted=step.abort),
            observation.EXPECT_DEFAULTS,
        )
        return output

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        written = self._enter(_Phase.PROCESSED)
        written.runner = runner = _runner_result(output)
        loading = observation.loading(self)
        try:
            updates = super().update_from_output(step, output)
        except BaseException:
            self._end_step()
            raise
        written.after = _without_defaults(
            observation.outcome(
                self, runner.sampled, updates, loading_before=loading, held_before=self._held
            ),
            observation.AFTER_DEFAULTS,
        )
        if self.config.spec_method is None:
            self._end_step()  # else drafts are to come
        return updates

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        copied = {request_id: list(tokens) for request_id, tokens in drafts.items()}
        if self._phase is _Phase.PROCESSED:
            assert self._step.runner is not None
            self._step.runner.draft = copied
            self._end_step()
        elif copied:
            self._enter(_Phase.CALLS).draft_token_ids = copied
        super().update_draft_token_ids(drafts)


class _NotingConnector:
    """Passes everything on, and notes the answers in a step."""

    step: TraceStep

    def __init__(self, connector: SchedulerConnector) -> None:
        self._connector = connector

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
        self.step.connector.append((request.request_id, num_computed_tokens, *answer))
        return answer

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, step: StepView) -> object:
        return self._connector.build_connector_meta(step)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._connector.update_connector_output(output)

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        kept = self._connector.request_finished(request, block_ids)
        if kept:
            self.step.kept.append(request.request_id)
        return kept

    def revoke_pin(self) -> str | None:
        request_id = self._connector.revoke_pin()
        self.step.revoked.append(request_id)
        return request_id

    def revoke_reservation(self, request_id: str) -> bool:
        return self._connector.revoke_reservation(request_id)


def trace_config(
    config: SchedulerConfig, cache_config: CacheConfig, *, kv_connector: bool
) -> TraceConfig:
    """The settings as a trace has them; `scheduler.replay` makes them of it again."""
    knobs = {knob.name: getattr(config, knob.name) for knob in fields(SchedulerConfig)}
    return TraceConfig(
        **knobs,
        block_size=cache_config.block_size,
        num_blocks_including_null=cache_config.num_blocks,
        enable_prefix_caching=cache_config.enable_prefix_caching,
        hash_block_size=cache_config.hash_block_size,
        kv_connector=kv_connector,
    )


def _added(request: Request) -> AddedRequest:
    sampling = request.sampling
    return AddedRequest(
        id=request.request_id,
        prompt_token_ids=list(request.all_token_ids[: request.num_prompt_tokens]),
        forced_token_ids=list(request.output_token_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        eos_token_ids=list(sampling.eos_token_ids),
        arrival_time=request.arrival_time,
        priority=request.priority,
        cache_salt=request.cache_salt,
        lora_name=request.lora_name,
        awaits_grammar=request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    )


def _runner_result(output: ModelRunnerOutput) -> RunnerResult:
    transfers = output.kv_connector_output or KVConnectorOutput()
    received = {i: list(tokens) for i, tokens in transfers.finished_recving.items()}
    return RunnerResult(
        sampled={i: list(tokens) for i, tokens in output.sampled_token_ids.items()},
        invalid_block_ids=sorted(transfers.invalid_block_ids),
        finished_recving=received if any(received.values()) else list(received),
        finished_sending=list(transfers.finished_sending),
        revoked_recving=list(transfers.revoked_recving),
    )


def _end_name(status: RequestStatus) -> EndName:
    assert status.name in get_args(EndName), status
    return status.name  # type: ignore[return-value]


def _without_defaults(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in values.items() if name not in defaults or v != defaults[name]}
