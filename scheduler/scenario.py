"""A small scenario, played to the real scheduler: who gets what in each step, and who waits why.

    Scenario ──► play ──► ScenarioRun: one ScenarioStep a step, one RequestResult a request

Values only; scenario_player.py has what happens in between.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol import BlockCounts, ConfigError, PromptTooLong
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.queue import Wait
from scheduler.scheduler import Scheduler

# ---------------------------------------------------------------------------------- what is played


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The first tokens of a prompt. Equal names mean equal tokens, as far as both go."""

    name: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class CachedPrefix:
    """A prompt that was computed before the first step: its full blocks are in the cache."""

    prefix: Prefix
    cache_salt: str | None = None
    lora: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScenarioRequest:
    """Lengths are in tokens, times are numbers of steps.

    Raises:
        ConfigError: two of its values cannot go together. `field` is the name here.
    """

    id: str
    prompt: int
    output: int
    arrival: int = 0
    priority: int = 0
    prefix: Prefix | None = None
    cache_salt: str | None = None
    lora: str | None = None
    abort: int | None = None  # before the scheduler decides this step

    def __post_init__(self) -> None:
        _at_least("prompt", self.prompt, 1)
        _at_least("output", self.output, 1)
        _at_least("arrival", self.arrival, 0)
        if self.prefix is not None and not 1 <= self.prefix.tokens <= self.prompt:
            raise ConfigError(
                "prefix",
                f"must have from 1 to {self.prompt} tokens (the prompt), not {self.prefix.tokens}",
            )
        if self.abort is not None and self.abort < self.arrival:
            raise ConfigError(
                "abort", f"must not be before the arrival in step {self.arrival}, not {self.abort}"
            )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the scheduler is told, and when.

    Raises:
        ConfigError: something in it cannot be played.
    """

    config: SchedulerConfig
    cache: CacheConfig
    requests: Sequence[ScenarioRequest]
    cached: Sequence[CachedPrefix] = ()

    def __post_init__(self) -> None:
        ids = [request.id for request in self.requests]
        twice = [request_id for request_id in dict.fromkeys(ids) if ids.count(request_id) > 1]
        if not ids:
            raise ConfigError("requests", "there are none")
        if twice:
            raise ConfigError("requests", f"there are two with the id {twice[0]!r}")
        if self.config.spec_method is not None:
            raise ConfigError("config", "spec_method: a scenario has no draft tokens")
        self._check_cached()

    def _check_cached(self) -> None:
        if not self.cached:
            return
        if not self.cache.enable_prefix_caching:
            raise ConfigError("cached", "needs enable_prefix_caching")
        scheduler = Scheduler(self.config, self.cache)
        for entry in self.cached:
            try:
                scheduler.check_fits(entry.prefix.tokens)
            except PromptTooLong as error:
                raise ConfigError("cached", f"{entry.prefix.name!r}: {error}") from error


# ------------------------------------------------------------------------------- what was decided


class Work(enum.StrEnum):
    """What a request's tokens of a step are for."""

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"  # at least some were computed before a preemption


@dataclass(frozen=True)
class Share:
    """What a request got of a step."""

    work: Work
    num_tokens: int
    num_computed_before: int
    num_again: int = 0  # of the tokens, those that had been computed before a preemption


@dataclass(frozen=True)
class Start:
    """A request that got a seat in this step."""

    num_cached_tokens: int  # the prefix hit
    resumed: bool  # after a preemption


@dataclass(frozen=True)
class Waiting:
    """Why a request waits: for something of its own, or behind another request."""

    wait: Wait | None = None
    behind: str | None = None

    @property
    def reason(self) -> str:
        if self.behind is not None:
            return f"behind {self.behind}"
        if self.wait is None:
            return "nothing that is known"
        return _REASONS.get(self.wait, self.wait.value)

    @property
    def label(self) -> str:
        """The reason without the name of the setting."""
        return self.reason.partition(" (")[0]


_REASONS = {
    Wait.SEAT: "a seat (max_num_seqs)",
    Wait.TOKENS: "tokens (the budget of the step)",
    Wait.BLOCKS: "KV blocks",
    Wait.PREEMPTION: "the next step, because this one preempts",
    Wait.LORA: "an adapter to leave (max_loras)",
    Wait.PARTIAL_PREFILL: "another prompt to be finished (max_num_partial_prefills)",
    Wait.LONG_PREFILL: "another long prompt to be finished (max_long_partial_prefills)",
    Wait.TURN: "its turn",
}


class Outcome(enum.StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REFUSED = "refused"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, kw_only=True)
class ScenarioStep:
    """One step. Seats and blocks are those right after the decision, before anybody ends."""

    number: int
    arrived: Sequence[str]
    refused: Mapping[str, str]  # id -> the error's text
    aborted: Sequence[str]
    shares: Mapping[str, Share]  # in scheduling order
    starts: Mapping[str, Start]
    preempted: Sequence[str]
    finished: Sequence[str]  # with the token that this step sampled
    idle: Sequence[str]  # they hold a seat and got nothing
    waiting: Mapping[str, Waiting]  # skipped ones first, then the queue, each in its order
    budget: int
    seats: int
    num_running: int
    blocks: BlockCounts

    @property
    def num_tokens(self) -> int:
        return sum(share.num_tokens for share in self.shares.values())

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {request_id: share.num_tokens for request_id, share in self.shares.items()}

    @property
    def is_empty(self) -> bool:
        """Whether the scheduler is as it was before this step."""
        return not (self.shares or self.preempted or self.aborted or self.arrived)

    @property
    def why_idle(self) -> str:
        if self.num_tokens >= self.budget:
            return "the budget of the step is used up"
        if self.preempted:
            return f"the step ended when {self.preempted[-1]} had to preempt itself"
        return "nothing of it could be computed"


@dataclass(frozen=True, kw_only=True)
class RequestResult:
    """What became of a request. A step that never came is None."""

    request: ScenarioRequest
    outcome: Outcome = Outcome.UNFINISHED
    first_token_step: int | None = None
    end_step: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # the prefix hit when it was first admitted
    num_preemptions: int = 0
    num_again: int = 0  # tokens that were computed once more

    @property
    def steps_to_first_token(self) -> int | None:
        """1 if its whole prompt was computed in the step of its arrival."""
        if self.first_token_step is None:
            return None
        return self.first_token_step - self.request.arrival + 1


class Ending(enum.StrEnum):
    """Why a run is over."""

    COMPLETE = "complete"  # every request has ended
    STUCK = "stuck"  # nothing will ever change again
    TRUNCATED = "truncated"  # after the number of steps that were asked for


@dataclass(frozen=True, kw_only=True)
class ScenarioRun:
    scenario: Scenario
    steps: Sequence[ScenarioStep]
    results: Mapping[str, RequestResult]  # in the scenario's order
    ending: Ending

    @property
    def num_preemptions(self) -> int:
        return sum(result.num_preemptions for result in self.results.values())


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(name, f"must be at least {least}, not {value}")
