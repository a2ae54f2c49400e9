"""Drives a runner by hand: scheduler outputs without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine import StepRunner
from protocol import SamplingParams, TokenLogprobs
from scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000)


@dataclass
class Drive:
    """One request as a test drives it: its whole block table is given from the start."""

    request_id: str
    token_ids: list[int]
    block_ids: Sequence[int]
    sampling: SamplingParams = GREEDY
    num_computed: int = 0
    num_prompt_tokens: int | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_known: bool = False

    def __post_init__(self) -> None:
        if self.num_prompt_tokens is None:
            self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - self.num_computed


def step(runner: StepRunner, scheduled: Sequence[tuple[Drive, int]]) -> dict[str, Sequence[int]]:
    """Compute the given number of tokens of each request and note what was sampled."""
    output = SchedulerOutput()
    for drive, num_tokens in scheduled:
        output.num_scheduled_tokens[drive.request_id] = num_tokens
        if drive.is_known:
            output.scheduled_cached_reqs.append(
                CachedRequestData(drive.request_id, (), drive.num_computed, len(drive.token_ids))
            )
        else:
            output.scheduled_new_reqs.append(_new(drive))
            drive.is_known = True
    computed = runner.execute(output)
    sampled = computed.sampled_token_ids
    for drive, num_tokens in scheduled:
        drive.num_computed += num_tokens
        drive.token_ids += sampled.get(drive.request_id, ())
        drive.output += sampled.get(drive.request_id, ())
        drive.logprobs += computed.logprobs.get(drive.request_id, ())
    return dict(sampled)


def generate(
    runner: StepRunner, drives: Sequence[Drive], num_tokens: int, chunk: int = 1_000_000
) -> None:
    """Run all requests together, `chunk` prompt tokens a step, until each has its output."""
    while running := [drive for drive in drives if len(drive.output) < num_tokens]:
        step(runner, [(drive, min(drive.num_missing, chunk)) for drive in running])


def blocks(count: int, first: int = 1) -> list[int]:
    """`count` block ids from `first` on."""
    return list(range(first, first + count))


def _new(drive: Drive) -> NewRequestData:
    assert drive.num_prompt_tokens is not None
    return NewRequestData(
        request_id=drive.request_id,
        token_ids=tuple(drive.token_ids),
        num_prompt_tokens=drive.num_prompt_tokens,
        sampling=drive.sampling,
        block_ids=drive.block_ids,
        num_computed_tokens=drive.num_computed,
    )
