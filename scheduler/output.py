"""The contract between the scheduler and the model runner: what to compute, what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol import KVConnectorOutput, SamplingParams


@dataclass(frozen=True)
class NewRequestData:
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


@dataclass(frozen=True)
class CachedRequestData:
    """A request that the runner knows: only what changed. The runner has its sampled tokens."""

    request_id: str
    new_block_ids: Sequence[int]
    num_computed_tokens: int


@dataclass
class SchedulerOutput:
    """One step: for each request, how many of its tokens are computed now.

    token index   0        num_computed            num_computed + num_scheduled
                  |  in KV blocks  |  computed in this step  |  later, if any
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_resumed_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # in scheduling order
    preempted_req_ids: list[str] = field(default_factory=list)
    finished_req_ids: list[str] = field(default_factory=list)  # since the last step
    kv_connector_metadata: object = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What a step computed.

    `sampled_token_ids` has an entry for each request whose last token was computed, that is, not
    for one in the middle of its prompt.
    """

    sampled_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
