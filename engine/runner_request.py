"""What a runner knows of the requests that it computes: its own copy, kept by diffs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sampling import LogitAdjuster
from protocol import SamplingParams
from scheduler import NewRequestData, SchedulerOutput


@dataclass(eq=False)
class RunnerRequest:
    """The runner's own copy of a request; it appends what it sampled itself."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    adjuster: LogitAdjuster | None  # of its logits, if its sampling asks for changes

    @classmethod
    def of(cls, new: NewRequestData) -> RunnerRequest:
        return cls(
            request_id=new.request_id,
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            sampling=new.sampling,
            block_ids=list(new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
            adjuster=LogitAdjuster.of(new.sampling, new.num_prompt_tokens),
        )

    @property
    def output_position(self) -> int:
        """The place that the next token will have in the output."""
        return len(self.token_ids) - self.num_prompt_tokens


class RunnerRequests:
    """All requests of a runner, by their ids."""

    def __init__(self) -> None:
        self._by_id: dict[str, RunnerRequest] = {}

    def __getitem__(self, request_id: str) -> RunnerRequest:
        return self._by_id[request_id]

    def update(self, step: SchedulerOutput) -> None:
        """Take in what a step says of them, before it is computed."""
        for request_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._by_id.pop(request_id, None)
        for new in (*step.scheduled_new_reqs, *step.scheduled_resumed_reqs):
            self._by_id[new.request_id] = RunnerRequest.of(new)
        for diff in step.scheduled_cached_reqs:
            request = self._by_id[diff.request_id]
            request.block_ids.extend(diff.new_block_ids)
            request.num_computed_tokens = diff.num_computed_tokens
            del request.token_ids[diff.num_tokens :]
