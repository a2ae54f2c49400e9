"""A step while the scheduler puts it together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from scheduler.queue import Wait
from scheduler.request import Request


class Step:
    """A step while it is put together; what a connector sees of it (`StepView`)."""

    def __init__(self, budget: int, preempted_before: Sequence[str] = ()) -> None:
        self.budget = budget  # tokens that can still be given out
        self._preempted_before = preempted_before  # between the last step and this one
        self.requests: dict[str, Request] = {}  # that were given some
        self.num_scheduled: dict[str, int] = {}
        self.preempted: list[str] = []
        self.admission_ended_by: Wait | None = None
        self.admission_ended_at: str | None = None
        self._cached: dict[str, CachedRequestData] = {}
        self._new: list[NewRequestData] = []
        self._resumed: list[NewRequestData] = []
        self._drafts: dict[str, Sequence[int]] = {}

    def continue_request(self, request: Request, num_new: int, fresh: Sequence[int]) -> None:
        """A running request gets `num_new` tokens; drafts are what goes beyond those it has."""
        request_id = request.request_id
        self._cached[request_id] = CachedRequestData(
            request_id,
            fresh,
            request.num_computed_tokens,
            request.num_tokens + request.num_output_placeholders,
        )
        if request.spec_token_ids:
            self._give_drafts(request, num_new)
        self.requests[request_id] = request
        self.num_scheduled[request_id] = num_new
        self.budget -= num_new

    def _give_drafts(self, request: Request, num_new: int) -> None:
        num_drafts = request.num_computed_tokens + num_new - request.num_tokens
        if num_drafts > 0:
            self._drafts[request.request_id] = list(request.spec_token_ids[:num_drafts])
        request.spec_token_ids = ()

    def start_request(self, request: Request, num_new: int, resumed: bool) -> None:
        """A waiting request is admitted with `num_new` tokens to compute."""
        data = NewRequestData(
            request_id=request.request_id,
            token_ids=request.all_token_ids[:],
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            block_ids=tuple(request.block_ids),
            num_computed_tokens=request.num_computed_tokens,
            lora_name=request.lora_name,
        )
        (self._resumed if resumed else self._new).append(data)
        self.requests[request.request_id] = request
        self.num_scheduled[request.request_id] = num_new
        self.budget -= num_new

    def withdraw(self, request: Request) -> bool:
        """Take back what a running request was given in this step; whether there was anything."""
        request_id = request.request_id
        if self._cached.pop(request_id, None) is None:
            return False
        self._drafts.pop(request_id, None)
        del self.requests[request_id]
        self.budget += self.num_scheduled.pop(request_id)
        return True

    def as_output(self) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=self._new,
            scheduled_resumed_reqs=self._resumed,
            scheduled_cached_reqs=list(self._cached.values()),
            num_scheduled_tokens=self.num_scheduled,
            scheduled_spec_tokens=self._drafts,
            preempted_req_ids=self.preempted_req_ids,
            admission_ended_by=self.admission_ended_by,
            admission_ended_at=self.admission_ended_at,
        )

    # What a connector sees. It looks before `num_computed_tokens` moves on.

    @property
    def scheduled_req_ids(self) -> Iterable[str]:
        return self.num_scheduled

    @property
    def preempted_req_ids(self) -> list[str]:
        return [*self._preempted_before, *self.preempted]

    def block_table(self, request_id: str) -> Sequence[int]:
        return self.requests[request_id].block_ids

    def computed_before(self, request_id: str) -> int:
        return self.requests[request_id].num_computed_tokens

    def computed_after(self, request_id: str) -> int:
        return self.computed_before(request_id) + self.num_scheduled[request_id]
