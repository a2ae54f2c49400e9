"""Steps for a runner that has no scheduler: all requests at once, with made-up prompts."""

import random
from collections.abc import Sequence

from protocol import SamplingParams
from scheduler import CachedRequestData, NewRequestData, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=1_000_000)


def prompt_ids(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(vocab_size), k=length)


def decode_step(vocab_size: int, batch: int, context: int, blocks: int) -> SchedulerOutput:
    """The last token of `batch` prompts of `context` tokens, whose others are in the cache."""
    ids = prompt_ids(vocab_size, context)
    step = SchedulerOutput()
    for n in range(batch):
        table = range(1 + n * blocks, 1 + (n + 1) * blocks)
        new = NewRequestData(f"r{n}", ids, context, GREEDY, table, context - 1)
        step.scheduled_new_reqs.append(new)
        step.num_scheduled_tokens[f"r{n}"] = 1
    return step


def next_step(batch: int, length: int) -> SchedulerOutput:
    """One more token of each, when each has `length` tokens."""
    step = SchedulerOutput()
    for n in range(batch):
        step.scheduled_cached_reqs.append(CachedRequestData(f"r{n}", (), length - 1, length))
        step.num_scheduled_tokens[f"r{n}"] = 1
    return step


def prefill_step(prompt: Sequence[int], block_size: int, num_tokens: int = 0) -> SchedulerOutput:
    """A whole prompt, with blocks for `num_tokens` that follow."""
    length = len(prompt)
    table = range(1, 1 + -(-(length + num_tokens) // block_size))
    new = NewRequestData("r0", prompt, length, GREEDY, table, 0)
    return SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"r0": length})


def last_step(batch: int) -> SchedulerOutput:
    """All of them are gone."""
    return SchedulerOutput(finished_req_ids=[f"r{n}" for n in range(batch)])
