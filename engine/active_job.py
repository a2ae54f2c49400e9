"""An attempt at a request, while a node works on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol import (
    Delta,
    Failure,
    FinishReason,
    Job,
    SamplingParams,
    Timeline,
    TokenLogprobs,
)
from scheduler import Request


@dataclass
class ActiveJob:
    """The job and what has been told of it.

    `key` is the scheduler's request id: two attempts of one request may be on a node at once, one
    of them only waiting for its blocks to be free. It stays when a later attempt takes over.
    """

    job: Job
    handed_off: bool = False  # the other half of the job is done, or to be done, by a peer
    key: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    num_cached_tokens: int | None = None
    position: int = 0  # of the next output token to be told
    failed: bool = False  # the caller has heard so of this attempt

    def __post_init__(self) -> None:
        self.position = len(self.job.emitted)
        self.key = self.key or str(self.job.ticket)

    @property
    def forced(self) -> tuple[int, ...]:
        """The output tokens that are given. With a hand-off, the last one comes with the commit."""
        return self.job.emitted[:-1] if self.handed_off else self.job.emitted

    def make_request(self, sampling: SamplingParams) -> Request:
        """The job as a scheduler sees it, to be sampled and ended as `sampling` says."""
        given = self.job.request
        return Request(
            self.key,
            given.prompt_token_ids,
            sampling,
            arrival_time=given.arrival_time,
            priority=given.priority,
            forced_token_ids=self.forced,
            lora_name=given.lora_name,
            cache_salt=given.cache_salt,
        )

    def delta(
        self,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        handed_off: bool = False,
        failure: Failure | None = None,
    ) -> Delta:
        """The next delta of this attempt."""
        last = finish_reason is not None or handed_off or failure is not None
        delta = Delta(
            request_id=self.job.request.request_id,
            attempt=self.job.attempt,
            position=self.position,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            handed_off=handed_off,
            failure=failure,
            timeline=self.timeline if last else None,
            num_cached_tokens=self.num_cached_tokens,
        )
        self.position += len(token_ids)
        return delta
