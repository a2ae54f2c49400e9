"""The contract between the scheduler and the model runner: what to compute, what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from protocol import KVConnectorOutput, SamplingParams, TokenLogprobs
from scheduler.queue import Wait
from scheduler.request import Request


class NewRequestData(msgspec.Struct, frozen=True):
    """A request that the runner sees for the first time, or again after a preemption.

    `token_ids` are all tokens that it has by now: the prompt (the first `num_prompt_tokens`),
    then forced and generated output.
    """

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: Sequence[int]
    num_computed_tokens: int
    lora_name: str | None = None


class CachedRequestData(msgspec.Struct, frozen=True):
    """A request that the runner knows: only what changed. The runner has its sampled tokens.

    `num_tokens` is how many tokens it has by now. If the runner has more, the rest was sampled from
    KV that turned out not to have been loaded, and does not count.
    """

    request_id: str
    new_block_ids: Sequence[int]
    num_computed_tokens: int
    num_tokens: int


@dataclass
class SchedulerOutput:
    """One step: for each request, how many of its tokens are computed now.

    token index   0        num_computed            num_computed + num_scheduled
                  |  in KV blocks  |  computed in this step  |  later, if any
                                        ... | drafts, if any |
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_resumed_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # in scheduling order
    scheduled_spec_tokens: dict[str, Sequence[int]] = field(default_factory=dict)
    preempted_req_ids: list[str] = field(default_factory=list)
    finished_req_ids: list[str] = field(default_factory=list)  # since the last step
    kv_connector_metadata: object = None
    num_prompt_tokens: int = 0  # scheduled tokens that came with their requests
    admission_ended_by: Wait | None = None  # what the next to be admitted lacked, if there was one
    admission_ended_at: str | None = None  # that request; None: nobody was looked at

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What a step computed.

    `sampled_token_ids` has an entry for each request whose last token was computed, that is, not
    for one in the middle of its prompt. After drafts it has those that were accepted and one more.
    `logprobs` has as many for each request that asks for them.
    """

    sampled_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)


class RequestUpdate(msgspec.Struct, frozen=True):
    """New output tokens of a request; the first of them is output token number `position`.

    `logprobs` are theirs, if the request asks for them.
    """

    request: Request
    new_token_ids: Sequence[int]
    position: int
    finished: bool
    logprobs: Sequence[TokenLogprobs] = ()
