"""Replays recorded runs, step by step, and names the first decision that differs.

    python -m scheduler.replay [--exact-blocks] FILE...

The scheduler is fed the recorded inputs, and everything that was recorded of its decisions and its
state is compared. The format is in `scheduler.trace`. Block ids depend on the order of the free
list: without `--exact-blocks` they may be renamed, the same way throughout the run.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from protocol import (
    ConfigError,
    KVConnectorOutput,
    KvrelayError,
    PromptTooLong,
    RequestView,
    SamplingParams,
    StepView,
)
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from scheduler.queue import Wait
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler
from scheduler.state import PauseState
from scheduler.trace import AddedRequest, RunnerResult, Trace, TraceConfig, TraceStep, parse_trace

Values = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as recorded."""

    step: int
    field: str
    recorded: object
    ours: object

    def __str__(self) -> str:
        return f"step {self.step}: {self.field}: recorded {self.recorded}, ours {self.ours}"


@dataclass(frozen=True)
class Refused:
    """A run that cannot be replayed, because this scheduler refuses a setting or a request."""

    errors: tuple[KvrelayError, ...]

    def __str__(self) -> str:
        return "refused: " + "; ".join(str(error) for error in self.errors)


# Where this scheduler differs from vLLM's on purpose (docs/scheduler.md): the name of the recorded
# run, what is expected instead of equality, and why.
_EXPECTED: dict[str, tuple[str, str]] = {
    "hazard_priority_uncomputed_hit": (
        "step 4: expect.num_scheduled_tokens: recorded [['A', 6]], ours [['A', 8]]",
        "blocks whose tokens were taken back in the same step are not hit",
    ),
    "worked_d_chunked_off_too_long": (
        "refused: max_num_batched_tokens: must be at least max_model_len (256) when chunked "
        "prefill is off, so that the longest prompt fits into a step, not 8; "
        "the prompt has 10 tokens, but a step without chunked prefill allows at most 8",
        "settings and prompts that block the queue for ever are refused",
    ),
}


def expected_difference(trace: Trace, found: Difference | Refused) -> str | None:
    """Why this difference is meant to be, if it is exactly the known one."""
    what, why = _EXPECTED.get(trace.name, ("", ""))
    return why if str(found) == what else None


@dataclass
class RecordedConnector:
    """Gives the recorded answers, in the recorded order."""

    send_ids: set[str] = field(default_factory=set)  # kept when they end well
    kept: list[str] = field(default_factory=list)  # of this step
    answers: list[tuple[str, int, int | None, bool]] = field(default_factory=list)
    revoked: list[str | None] = field(default_factory=list)
    unanswered: list[tuple[str, int]] = field(default_factory=list)  # the recording has none

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.answers:
            request_id, local, number, load_async = self.answers[0]
            if (request_id, local) == (request.request_id, num_computed_tokens):
                del self.answers[0]
                return number, load_async
        self.unanswered.append((request.request_id, num_computed_tokens))
        return None, False

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, step: StepView) -> object: ...

    def update_connector_output(self, output: KVConnectorOutput) -> None: ...

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        if request.request_id in self.kept:
            return True
        assert isinstance(request, Request)
        return request.status in _ENDED_WELL and request.request_id in self.send_ids

    def revoke_pin(self) -> str | None:
        return self.revoked.pop(0) if self.revoked else None


_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ERROR: "error",
}
_EXPECT_DEFAULTS: Values = {
    "scheduled_spec_tokens": {},
    "block_ids": {},
    "appended_block_ids": {},
    "finished_req_ids": [],
    "free_delayed": [],
    "num_computed_tokens_before": {},
}
_AFTER_DEFAULTS: Values = {"stop_reason": {}, "emitted": {}, "free_delayed": []}


class Replay:
    """One recorded run, fed to a new scheduler.

    Raises:
        ConfigError: this scheduler refuses the settings.
    """

    def __init__(self, trace: Trace, *, exact_blocks: bool = False) -> None:
        config = trace.config
        self._trace = trace
        self._exact_blocks = exact_blocks
        self._connector = RecordedConnector() if config.kv_connector else None
        self._hash_block_size = config.hash_block_size or config.block_size
        self.scheduler = Scheduler(scheduler_config(config), cache_config(config), self._connector)
        self._ours_of: dict[int, int] = {}  # block ids: recorded to ours
        self._recorded_of: dict[int, int] = {}  # and back
        self._pending: SchedulerOutput | None = None  # of the step before, if asynchronous

    def first_difference(self) -> Difference | None:
        """Raises KvrelayError: a request is refused."""
        return next(self.differences(), None)

    def differences(self) -> Iterator[Difference]:
        """In the order of steps."""
        for number, step in enumerate(self._trace.steps):
            for name, recorded, ours in self._run_step(step):
                if recorded != ours:
                    yield Difference(number, name, recorded, ours)
            self.scheduler.check_integrity()

    # ------------------------------------------------------------------ a step

    def _run_step(self, step: TraceStep) -> Iterator[tuple[str, object, object]]:
        scheduler = self.scheduler
        for added in step.add:
            scheduler.add_request(self._request(added))
        for request_id in step.grammar_ready:
            scheduler.grammar_ready(request_id)
        if step.pause is not None:
            scheduler.set_pause_state(PauseState[step.pause])
        self._feed_connector(step)
        aborted = self._abort(step.abort)
        if step.reset is not None:
            scheduler.reset_prefix_cache(reset_running_requests=step.reset)
        loading = _loading(scheduler)
        output = scheduler.schedule()
        if self._connector is not None:
            yield "connector", step.connector, self._asked(step)
        ours = self._decided(output, newly_loading=_loading(scheduler) - loading)
        ours["free_delayed"] = self._held(aborted)
        yield from self._compare("expect", step.expect, ours, _EXPECT_DEFAULTS)
        held = self._held(self._abort(step.abort_during))
        computed = output
        if self._trace.config.async_scheduling:
            computed, self._pending = self._pending, output  # type: ignore[assignment]
        if step.runner is not None:
            yield from self._finish_step(step, step.runner, computed, held)

    def _finish_step(
        self, step: TraceStep, runner: RunnerResult, computed: SchedulerOutput, held: list[str]
    ) -> Iterator[tuple[str, object, object]]:
        scheduler = self.scheduler
        loading = _loading(scheduler)
        updates = scheduler.update_from_output(computed, self._runner_output(runner))
        if runner.draft:
            scheduler.update_draft_token_ids(runner.draft)
        ours = self._state_after(runner, updates)
        # Those whose load ended while it was processed had to wait for that, too.
        ours["free_delayed"] = held + [
            i for i in ours["finished"] if i in loading or i in scheduler.requests
        ]
        yield from self._compare("after", step.after or {}, ours, _AFTER_DEFAULTS)

    def _feed_connector(self, step: TraceStep) -> None:
        if self._connector is not None:
            self._connector.answers = list(step.connector)
            self._connector.revoked = list(step.revoked)
            self._connector.kept = list(step.kept)
            self._connector.unanswered.clear()

    def _asked(self, step: TraceStep) -> object:
        """The questions as recorded, or those that were asked instead."""
        assert self._connector is not None
        connector = self._connector
        if not connector.answers and not connector.unanswered:
            return step.connector
        num_given = len(step.connector) - len(connector.answers)
        return [*step.connector[:num_given], *connector.unanswered]

    def _abort(self, request_ids: Iterable[str]) -> list[str]:
        ended: list[Request] = []
        for request_id in request_ids:
            ended += self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        return [request.request_id for request in ended]

    def _held(self, request_ids: Iterable[str]) -> list[str]:
        return [i for i in request_ids if i in self.scheduler.requests]

    def _request(self, added: AddedRequest) -> Request:
        if self._connector is not None and added.send_steps:
            self._connector.send_ids.add(added.id)
        eos = [] if added.eos_token_id is None else [added.eos_token_id]
        return Request(
            added.id,
            added.prompt_token_ids,
            SamplingParams(
                max_tokens=added.max_tokens,
                min_tokens=added.min_tokens,
                stop_token_ids=tuple(added.stop_token_ids),
                eos_token_ids=(*eos, *added.eos_token_ids),
            ),
            arrival_time=added.arrival_time,
            priority=added.priority,
            forced_token_ids=added.forced_token_ids,
            cache_salt=added.cache_salt,
            lora_name=f"lora-{added.lora}" if added.lora is not None else added.lora_name,
            hash_block_size=self._hash_block_size,
            awaits_grammar=added.awaits_grammar,
        )

    def _runner_output(self, runner: RunnerResult) -> ModelRunnerOutput:
        received = runner.finished_recving
        if not isinstance(received, dict):
            received = {request_id: [] for request_id in received}
        transfers = KVConnectorOutput(
            finished_recving={i: tuple(tokens) for i, tokens in received.items()},
            finished_sending=tuple(runner.finished_sending),
            invalid_block_ids=frozenset(self._ours_of.get(b, b) for b in runner.invalid_block_ids),
        )
        return ModelRunnerOutput(runner.sampled, transfers or None)

    # ------------------------------------------------------------------ what is compared

    def _decided(self, output: SchedulerOutput, newly_loading: set[str]) -> Values:
        scheduler = self.scheduler
        requests = scheduler.requests
        new, resumed = output.scheduled_new_reqs, output.scheduled_resumed_reqs
        cached = output.scheduled_cached_reqs
        before = {r.request_id: r.num_computed_tokens for r in (*new, *resumed)}
        before |= {r.request_id: r.num_computed_tokens for r in cached}
        return {
            "num_scheduled_tokens": [list(x) for x in output.num_scheduled_tokens.items()],
            "new": [r.request_id for r in new],
            "resumed": [r.request_id for r in resumed],
            "preempted": output.preempted_req_ids,
            "scheduled_spec_tokens": {i: list(t) for i, t in output.scheduled_spec_tokens.items()},
            "num_computed_tokens_before": before,
            "block_ids": {r.request_id: list(r.block_ids) for r in [*new, *resumed]}
            | {i: list(requests[i].block_ids) for i in newly_loading},
            "appended_block_ids": {
                r.request_id: list(r.new_block_ids) for r in cached if r.new_block_ids
            },
            "num_blocks": {i: len(r.block_ids) for i, r in requests.items() if r.block_ids},
            "running": _ids(scheduler.running),
            "waiting": _ids(scheduler.waiting),
            "skipped_waiting": _ids(scheduler.skipped_waiting),
            "free_blocks": scheduler.kv.pool.num_unused,
            "status": {i: r.status.name for i, r in requests.items()},
            "finished_req_ids": output.finished_req_ids,
        }

    def _state_after(self, runner: RunnerResult, updates: Sequence[RequestUpdate]) -> Values:
        scheduler = self.scheduler
        ended = [u.request for u in updates if u.finished]
        waiting = [*scheduler.waiting, *scheduler.skipped_waiting]
        known = [*scheduler.running, *(r for r in waiting if r.num_computed_tokens)]
        return {
            "finished": {r.request_id: _REASONS[r.status] for r in ended},
            "stop_reason": {
                r.request_id: r.stop_token_id for r in ended if r.stop_token_id is not None
            },
            "emitted": _emitted(runner, updates),
            "num_tokens": {r.request_id: r.num_tokens for r in known},
            "num_computed_tokens": {r.request_id: r.num_computed_tokens for r in known},
            "free_blocks": scheduler.kv.pool.num_unused,
        }

    def _compare(
        self, section: str, recorded: Values, ours: Values, defaults: Values
    ) -> Iterator[tuple[str, object, object]]:
        for name, value in ours.items():
            wanted = recorded.get(name, defaults.get(name))
            if name in ("block_ids", "appended_block_ids") and not self._exact_blocks:
                wanted = self._rename(wanted, value)
            yield f"{section}.{name}", wanted, value
        for name in recorded.keys() - ours.keys():
            yield f"{section}.{name}", recorded[name], "not known here"

    def _rename(self, recorded: object, ours: Mapping[str, list[int]]) -> object:
        """The recorded tables in our block ids, as far as each id has one partner."""
        if not isinstance(recorded, dict) or recorded.keys() != ours.keys():
            return recorded
        renamed = {}
        for request_id, table in recorded.items():
            if not isinstance(table, list) or len(table) != len(ours[request_id]):
                return recorded
            renamed[request_id] = [
                self._partner(theirs, mine)
                for theirs, mine in zip(table, ours[request_id], strict=True)
            ]
        return renamed

    def _partner(self, recorded: int, ours: int) -> object:
        if recorded not in self._ours_of and ours not in self._recorded_of:
            self._ours_of[recorded], self._recorded_of[ours] = ours, recorded
        if self._ours_of.get(recorded) == ours:
            return ours
        return f"{recorded}, which is {self._ours_of.get(recorded)} elsewhere"


def _emitted(runner: RunnerResult, updates: Sequence[RequestUpdate]) -> Values:
    """Tokens that were kept, where they are not those that were sampled."""
    kept: dict[str, list[int]] = {}
    for update in updates:
        kept.setdefault(update.request.request_id, []).extend(update.new_token_ids)
    return {i: kept.get(i, []) for i, tokens in runner.sampled.items() if kept.get(i, []) != tokens}


def _loading(scheduler: Scheduler) -> set[str]:
    return set(_ids(scheduler.skipped_waiting.waiting_for(Wait.REMOTE_KVS)))


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def scheduler_config(config: TraceConfig) -> SchedulerConfig:
    """Raises ConfigError: the settings cannot go together, here."""
    knobs = {
        knob.name: getattr(config, knob.name)
        for knob in fields(SchedulerConfig)
        if getattr(config, knob.name) is not None
    }
    derived = SchedulerConfig(**knobs)
    if config.num_lookahead_tokens not in (None, derived.num_lookahead_tokens):
        raise ConfigError(
            "num_lookahead_tokens",
            f"must be {derived.num_lookahead_tokens} with {config.spec_method}, "
            f"not {config.num_lookahead_tokens}",
        )
    return derived


def cache_config(config: TraceConfig) -> CacheConfig:
    """Raises ConfigError: there is no such pool."""
    return CacheConfig(
        num_blocks=config.num_blocks_including_null,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        hash_block_size=config.hash_block_size or config.block_size,
    )


def replay(trace: Trace, *, exact_blocks: bool = False) -> Difference | Refused | None:
    """The first difference, if there is one, or why the run cannot be replayed."""
    errors: list[KvrelayError] = []
    try:
        return Replay(trace, exact_blocks=exact_blocks).first_difference()
    except ConfigError as error:
        errors.append(error)
    except PromptTooLong as error:
        return Refused((error,))
    errors.extend(_refused_requests(trace))
    return Refused(tuple(errors))


def _refused_requests(trace: Trace) -> Iterator[KvrelayError]:
    """What would have been refused if the settings had not been."""
    config = trace.config
    if config.enable_chunked_prefill or config.long_prefill_token_threshold:
        return
    limit = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    for added in (added for step in trace.steps for added in step.add):
        if len(added.prompt_token_ids) > limit:
            yield PromptTooLong(
                "prompt", len(added.prompt_token_ids), limit, "a step without chunked prefill"
            )


def load(path: Path) -> Trace:
    """A recorded run from a file, which may be compressed with gzip.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        data = path.read_bytes()
        return parse_trace(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError) as error:
        raise ConfigError("trace", f"cannot be read: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a run differs, other than as expected; 2 if one is no trace."""
    parser = argparse.ArgumentParser(prog="python -m scheduler.replay", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--exact-blocks", action="store_true", help="compare block ids as they are")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.files:
        try:
            trace = load(path)
        except ConfigError as error:
            print(f"{path}: {error}")
            status = 2
            continue
        found = replay(trace, exact_blocks=options.exact_blocks)
        why = expected_difference(trace, found) if found is not None else None
        if found is None:
            print(f"{path}: ok")
        elif why is not None:
            print(f"{path}: differs as expected, {why}: {found}")
        else:
            print(f"{path}: differs: {found}")
            status = max(status, 1)
    return status


if __name__ == "__main__":
    sys.exit(main())
