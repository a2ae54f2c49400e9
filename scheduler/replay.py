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
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from msgspec import structs

from protocol import (
    ConfigError,
    InvalidRequest,
    KVConnectorOutput,
    KvrelayError,
    PromptTooLong,
    RequestView,
    SamplingParams,
    SchedulerConnector,
    StepView,
)
from scheduler import observation
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.observation import Values
from scheduler.output import ModelRunnerOutput, SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler
from scheduler.state import PauseState
from scheduler.trace import AddedRequest, RunnerResult, Trace, TraceConfig, TraceStep, parse_trace


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
        "the prompt has 10 tokens, but max_model_len allows at most 8",
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

    def revoke_reservation(self, request_id: str) -> bool:
        return False  # what came of asking is in the results


_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

MakeScheduler = Callable[[SchedulerConfig, CacheConfig, SchedulerConnector | None], Scheduler]


class Replay:
    """One recorded run, fed to a new scheduler.

    Raises:
        ConfigError: this scheduler refuses the settings.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        exact_blocks: bool = False,
        make_scheduler: MakeScheduler = Scheduler,
    ) -> None:
        config = trace.config
        self._trace = trace
        self._exact_blocks = exact_blocks
        self._connector = RecordedConnector() if config.kv_connector else None
        self._hash_block_size = config.hash_block_size or config.block_size
        self.scheduler = make_scheduler(
            scheduler_config(config), cache_config(config), self._connector
        )
        self._in_flight: deque[SchedulerOutput] = deque()  # steps that have no results yet
        self._ours_of: dict[int, int] = {}  # block ids: recorded to ours
        self._recorded_of: dict[int, int] = {}  # and back

    def first_difference(self) -> Difference | None:
        """Raises KvrelayError: a request is refused."""
        return next(self.differences(), None)

    def differences(self) -> Iterator[Difference]:
        """In the order of steps."""
        # That looks at each block, of which a node that serves has far more than a step touches.
        check_every = 1 + self._trace.config.num_blocks_including_null // 1000
        for number, step in enumerate(self._trace.steps):
            for name, recorded, ours in self._run_step(step):
                if recorded != ours:
                    yield Difference(number, name, recorded, ours)
            if number % check_every == 0:
                self.scheduler.check_integrity()
        self.scheduler.check_integrity()

    # ------------------------------------------------------------------ a step

    def _run_step(self, step: TraceStep) -> Iterator[tuple[str, object, object]]:
        self._feed_connector(step)
        aborted = self._feed_scheduler(step)
        if step.expect is not None:
            yield from self._decide(step, step.expect, aborted)
        held = observation.held(self.scheduler, self._abort(step.abort_during, step))
        if step.runner is not None:
            yield from self._finish_step(step, step.runner, held)
        elif step.after is not None:
            yield "after", step.after, "not known without runner"

    def _feed_scheduler(self, step: TraceStep) -> list[str]:
        """What happened before the decision; the ids that were aborted."""
        scheduler = self.scheduler
        if step.draft_token_ids:
            scheduler.update_draft_token_ids(step.draft_token_ids)
        for added in step.add:
            scheduler.add_request(self._request(added))
        for request_id in step.grammar_ready:
            scheduler.grammar_ready(request_id)
        if step.pause is not None:
            scheduler.set_pause_state(PauseState[step.pause])
        aborted = self._abort(step.abort, step)
        if step.reset is not None:
            scheduler.reset_prefix_cache(reset_running_requests=step.reset)
        return aborted

    def _decide(
        self, step: TraceStep, recorded: Values, aborted: list[str]
    ) -> Iterator[tuple[str, object, object]]:
        loading = observation.loading(self.scheduler)
        output = self.scheduler.schedule()
        self._in_flight.append(output)
        if self._connector is not None:
            yield "connector", step.connector, self._asked(step)
        ours = observation.decision(self.scheduler, output, loading_before=loading, aborted=aborted)
        yield from self._compare("expect", recorded, ours, observation.EXPECT_DEFAULTS)

    def _finish_step(
        self, step: TraceStep, runner: RunnerResult, held: list[str]
    ) -> Iterator[tuple[str, object, object]]:
        if not self._in_flight:
            raise ConfigError("runner", "has results, but each step that was decided has its own")
        scheduler, computed = self.scheduler, self._in_flight.popleft()
        loading = observation.loading(scheduler)
        sampled = self._sampled(computed, runner)
        updates = scheduler.update_from_output(
            computed, ModelRunnerOutput(sampled, self._transfers(runner))
        )
        if runner.draft:
            scheduler.update_draft_token_ids(runner.draft)
        ours = observation.outcome(
            scheduler, sampled, updates, loading_before=loading, held_before=held
        )
        yield from self._compare("after", step.after or {}, ours, observation.AFTER_DEFAULTS)

    def _sampled(self, computed: SchedulerOutput, runner: RunnerResult) -> dict[str, list[int]]:
        return runner.sampled

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

    def _abort(self, request_ids: Iterable[str], step: TraceStep) -> list[str]:
        ended: list[Request] = []
        for request_id in request_ids:
            status = RequestStatus[step.ended_as.get(request_id, "FINISHED_ABORTED")]
            ended += self.scheduler.finish_requests([request_id], status)
        return [request.request_id for request in ended]

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

    def _transfers(self, runner: RunnerResult) -> KVConnectorOutput | None:
        received = runner.finished_recving
        if not isinstance(received, dict):
            received = {request_id: [] for request_id in received}
        transfers = KVConnectorOutput(
            finished_recving={i: tuple(tokens) for i, tokens in received.items()},
            finished_sending=tuple(runner.finished_sending),
            revoked_recving=tuple(runner.revoked_recving),
            invalid_block_ids=frozenset(self._ours_of.get(b, b) for b in runner.invalid_block_ids),
        )
        return transfers or None

    # ------------------------------------------------------------------ what is compared

    def _compare(
        self, section: str, recorded: Values, ours: Values, defaults: Values
    ) -> Iterator[tuple[str, object, object]]:
        for name, value in ours.items():
            wanted = recorded.get(name, defaults.get(name))
            if name in ("block_ids", "appended_block_ids") and not self._exact_blocks:
                wanted = self._rename(wanted, value)
            yield f"{section}.{name}", wanted, value
        for name, wanted in recorded.items():
            if name not in ours:
                yield f"{section}.{name}", wanted, "not known here"

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
    try:
        return Replay(trace, exact_blocks=exact_blocks).first_difference()
    except ConfigError as error:
        return Refused((error, *_refused_requests(trace)))
    except InvalidRequest as error:
        return Refused((error,))


def _refused_requests(trace: Trace) -> Iterator[KvrelayError]:
    """What is refused as well if the longest request is what a step can take in one piece."""
    config = trace.config
    budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    longest = min(config.max_model_len, budget)
    try:
        scheduler = Replay(Trace(structs.replace(config, max_model_len=longest), [])).scheduler
    except ConfigError:
        return  # something else is wrong with the settings
    for added in (added for step in trace.steps for added in step.add):
        try:
            scheduler.check_fits(len(added.prompt_token_ids) + len(added.forced_token_ids))
        except PromptTooLong as error:
            yield error


def load(path: Path) -> Trace:
    """A recorded run from a file, which may be compressed with gzip.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        data = path.read_bytes()
        return parse_trace(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, zlib.error) as error:
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
