"""A step while the scheduler puts it together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from scheduler.request import Request


class Step:
    """A step while it is put together; what a connector sees of it (`StepView`)."""

    def __init__(self, kv: KVCacheManager, requests: Mapping[str, Request], budget: int) -> None:
        self._kv = kv
        self._requests = requests
        self._cached: dict[str, CachedRequestData] = {}
        self.budget = budget
        self.preempted: list[str] = []
        self._new: list[NewRequestData] = []
        self._resumed: list[NewRequestData] = []
        self._num_scheduled: dict[str, int] = {}

    def continue_request(self, request: Request, num_new: int, fresh: Sequence[int]) -> None:
        request_id = request.request_id
        self._cached[request_id] = CachedRequestData(request_id, fresh, request.num_computed_tokens)
        self._give(request_id, num_new)

    def start_request(self, request: Request, num_new: int, resumed: bool) -> None:
        data = NewRequestData(
            request_id=request.request_id,
            token_ids=tuple(request.all_token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            block_ids=tuple(self._kv.block_table(request.request_id)),
            num_computed_tokens=request.num_computed_tokens,
        )
        (self._resumed if resumed else self._new).append(data)
        self._give(request.request_id, num_new)

    def _give(self, request_id: str, num_new: int) -> None:
        self._num_scheduled[request_id] = num_new
        self.budget -= num_new

    def withdraw(self, request: Request) -> bool:
        """Take back what a running request was given in this step; whether there was anything."""
        if self._cached.pop(request.request_id, None) is None:
            return False
        self.budget += self._num_scheduled.pop(request.request_id)
        return True

    @property
    def output(self) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=self._new,
            scheduled_resumed_reqs=self._resumed,
            scheduled_cached_reqs=list(self._cached.values()),
            num_scheduled_tokens=self._num_scheduled,
        )

    # What a connector sees. It looks before `num_computed_tokens` moves on.

    @property
    def scheduled_req_ids(self) -> Iterable[str]:
        return self._num_scheduled

    @property
    def preempted_req_ids(self) -> Sequence[str]:
        return self.preempted

    def block_table(self, request_id: str) -> Sequence[int]:
        return self._kv.block_table(request_id)

    def computed_before(self, request_id: str) -> int:
        return self._requests[request_id].num_computed_tokens
