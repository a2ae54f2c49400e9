"""Plays a scenario to the real scheduler.

A step of the scenario is a step of the scheduler, in the order in which an engine does it:

    requests arrive (or are refused) ─► aborts ─► schedule ─► a token is made up for each request
                                                              whose last token was computed

No model and no clock: a token id says only whether two prompts begin alike, and time is the number
of the step. The same scenario therefore always gives the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from protocol import PromptTooLong, SamplingParams
from scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.scenario import (
    Ending,
    Outcome,
    Prefix,
    RequestResult,
    Scenario,
    ScenarioRequest,
    ScenarioRun,
    ScenarioStep,
    Share,
    Start,
    Waiting,
    Work,
)
from scheduler.scheduler import Scheduler

DEFAULT_MAX_STEPS = 500


def play(scenario: Scenario, max_steps: int = DEFAULT_MAX_STEPS) -> ScenarioRun:
    """Play the scenario until all requests have ended, nothing moves, or `max_steps` are over."""
    play = _Play(scenario)
    play.fill_cache()
    steps: list[ScenarioStep] = []
    while not play.ended and not play.is_stuck(steps) and len(steps) < max_steps:
        steps.append(play.step(len(steps)))
    if play.ended:
        ending = Ending.COMPLETE
    else:
        ending = Ending.STUCK if play.is_stuck(steps) else Ending.TRUNCATED
    return ScenarioRun(scenario=scenario, steps=steps, results=play.results(), ending=ending)


@dataclass
class _Progress:
    """A request of the scenario while it is played."""

    result: RequestResult
    num_ever_computed: int = 0
    live: Request | None = None  # what the scheduler sees; None before it arrives

    def note(self, **changes: object) -> None:
        self.result = replace(self.result, **changes)  # type: ignore[arg-type]

    def final(self) -> RequestResult:
        if self.live is None:
            return self.result
        return replace(
            self.result,
            num_output_tokens=len(self.live.output_token_ids),
            num_cached_tokens=self.live.num_cached_tokens or 0,
            num_preemptions=self.live.num_preemptions,
        )


class _Play:
    """The scheduler, a runner that makes tokens up, and what is known of each request."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._scheduler = Scheduler(scenario.config, scenario.cache)
        self._tokens = _Tokens(scenario)
        self._progress = {r.id: _Progress(RequestResult(request=r)) for r in scenario.requests}
        events = [(r.arrival, r.abort or 0) for r in scenario.requests]
        self._last_event = max(itertools.chain.from_iterable(events))

    @property
    def ended(self) -> bool:
        return all(p.result.outcome is not Outcome.UNFINISHED for p in self._progress.values())

    def is_stuck(self, steps: Sequence[ScenarioStep]) -> bool:
        """Whether the last step changed nothing and nothing will come from outside."""
        return bool(steps) and steps[-1].is_empty and steps[-1].number >= self._last_event

    def results(self) -> dict[str, RequestResult]:
        return {request_id: p.final() for request_id, p in self._progress.items()}

    def fill_cache(self) -> None:
        """Compute the prompts that are said to be cached, one after the other."""
        for entry in self._scenario.cached:
            request = self._make_request(
                f"cached {entry.prefix.name}",
                self._tokens.prompt(entry.prefix, entry.prefix.tokens),
                SamplingParams(max_tokens=1),
                cache_salt=entry.cache_salt,
                lora_name=entry.lora,
            )
            self._scheduler.add_request(request)
            while not request.status.finished:
                self._compute(self._scheduler.schedule())

    def step(self, number: int) -> ScenarioStep:
        arrived = [r for r in self._scenario.requests if r.arrival == number]
        refused = dict(self._add(arrived, number))
        aborted = list(self._abort(number))
        output = self._scheduler.schedule()
        computed = _computed_before(output)
        decided = ScenarioStep(
            number=number,
            arrived=[request.id for request in arrived],
            refused=refused,
            aborted=aborted,
            shares={i: self._share(i, computed[i], n) for i, n in _scheduled(output)},
            starts=_starts(output),
            preempted=list(output.preempted_req_ids),
            finished=(),
            idle=[
                request.request_id
                for request in self._scheduler.running
                if request.request_id not in output.num_scheduled_tokens
            ],
            waiting=dict(self._waiting(output)),
            budget=self._scenario.config.token_budget,
            seats=self._scenario.config.max_num_seqs,
            num_running=len(self._scheduler.running),
            blocks=self._scheduler.block_counts(),
        )
        finished = self._note_updates(number, self._compute(output))
        return replace(decided, finished=finished)

    def _add(self, arrived: Sequence[ScenarioRequest], number: int) -> Iterator[tuple[str, str]]:
        for index, entry in enumerate(arrived):
            request = self._make_request(
                entry.id,
                self._tokens.prompt(entry.prefix, entry.prompt),
                SamplingParams(max_tokens=entry.output),
                # Those of one step come one after the other, as the scenario lists them.
                arrival_time=number + index / len(arrived),
                priority=entry.priority,
                cache_salt=entry.cache_salt,
                lora_name=entry.lora,
            )
            progress = self._progress[entry.id]
            try:
                self._scheduler.add_request(request)
            except PromptTooLong as error:
                progress.note(outcome=Outcome.REFUSED, end_step=number)
                yield entry.id, str(error)
            else:
                progress.live = request

    def _make_request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None,
        lora_name: str | None,
    ) -> Request:
        return Request(
            request_id,
            token_ids,
            sampling,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            lora_name=lora_name,
            hash_block_size=self._scenario.cache.hash_block_size,
        )

    def _abort(self, number: int) -> Iterator[str]:
        ids = [request.id for request in self._scenario.requests if request.abort == number]
        for request in self._scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED):
            self._progress[request.request_id].note(outcome=Outcome.ABORTED, end_step=number)
            yield request.request_id

    def _share(self, request_id: str, num_computed: int, num_tokens: int) -> Share:
        progress = self._progress[request_id]
        num_again = max(0, min(progress.num_ever_computed - num_computed, num_tokens))
        progress.num_ever_computed = max(progress.num_ever_computed, num_computed + num_tokens)
        progress.note(num_again=progress.result.num_again + num_again)
        if num_again:
            work = Work.RECOMPUTE
        else:
            in_prompt = num_computed < progress.result.request.prompt
            work = Work.PREFILL if in_prompt else Work.DECODE
        return Share(work, num_tokens, num_computed, num_again)

    def _waiting(self, output: SchedulerOutput) -> Iterator[tuple[str, Waiting]]:
        """Whoever ended admission lacked something; all others are behind, or were passed over."""
        skipped, ended_by = self._scheduler.skipped_waiting, output.admission_ended_by
        ended_at = output.admission_ended_at
        for request in skipped:
            wait = ended_by if request.request_id == ended_at else skipped.waits_for(request)
            yield request.request_id, Waiting(wait=wait)
        for request in self._scheduler.waiting:
            if ended_at is None:
                ended_at = request.request_id
            if request.request_id == ended_at:
                yield ended_at, Waiting(wait=ended_by)
            else:
                yield request.request_id, Waiting(behind=ended_at)

    def _compute(self, output: SchedulerOutput) -> list[RequestUpdate]:
        """What a runner does, but for the model."""
        sampled = {
            request_id: [self._tokens.next()]
            for request_id in output.num_scheduled_tokens
            if not self._scheduler.requests[request_id].prefilling
        }
        return self._scheduler.update_from_output(
            output, ModelRunnerOutput(sampled_token_ids=sampled)
        )

    def _note_updates(self, number: int, updates: Sequence[RequestUpdate]) -> list[str]:
        finished = []
        for update in updates:
            progress = self._progress[update.request.request_id]
            if update.position == 0:
                progress.note(first_token_step=number)
            if update.finished:
                progress.note(outcome=Outcome.FINISHED, end_step=number)
                finished.append(update.request.request_id)
        return finished


class _Tokens:
    """Token ids. No two are equal, but for those of prefixes that share a name."""

    def __init__(self, scenario: Scenario) -> None:
        self._numbers = itertools.count()
        prefixes = [entry.prefix for entry in scenario.cached]
        prefixes += [r.prefix for r in scenario.requests if r.prefix is not None]
        longest: dict[str, int] = {}
        for prefix in prefixes:
            longest[prefix.name] = max(prefix.tokens, longest.get(prefix.name, 0))
        self._prefixes = {name: self._take(length) for name, length in longest.items()}

    def prompt(self, prefix: Prefix | None, length: int) -> list[int]:
        shared = [] if prefix is None else self._prefixes[prefix.name][: prefix.tokens]
        return shared + self._take(length - len(shared))

    def next(self) -> int:
        return next(self._numbers)

    def _take(self, length: int) -> list[int]:
        return list(itertools.islice(self._numbers, length))


def _scheduled(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    yield from output.num_scheduled_tokens.items()


def _computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Of each scheduled request, the tokens that were computed before this step, or hit."""
    started = [*output.scheduled_new_reqs, *output.scheduled_resumed_reqs]
    computed = {request.request_id: request.num_computed_tokens for request in started}
    for request in output.scheduled_cached_reqs:
        computed[request.request_id] = request.num_computed_tokens
    return computed


def _starts(output: SchedulerOutput) -> dict[str, Start]:
    new = {r.request_id: Start(r.num_computed_tokens, False) for r in output.scheduled_new_reqs}
    resumed = {
        r.request_id: Start(r.num_computed_tokens, True) for r in output.scheduled_resumed_reqs
    }
    return new | resumed
