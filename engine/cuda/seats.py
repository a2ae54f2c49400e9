"""A place for each request that a device knows: a row of block ids here, its last token there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.runner_request import RunnerRequests
from scheduler import SchedulerOutput


class Seats:
    """As many as requests may run at once. Block tables are kept, instead of made in each step."""

    def __init__(self, num_seats: int, max_blocks: int) -> None:
        self._tables = np.zeros((num_seats, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(num_seats, dtype=np.int64)
        self._of: dict[str, int] = {}
        self._free = list(reversed(range(num_seats)))

    def __getitem__(self, request_id: str) -> int:
        return self._of[request_id]

    def __len__(self) -> int:
        """Those that are taken."""
        return len(self._of)

    def update(self, step: SchedulerOutput, requests: RunnerRequests) -> None:
        """Take in what a step says, after `requests` have."""
        for request_id in (*step.finished_req_ids, *step.preempted_req_ids):
            if request_id in self._of:
                self._free.append(self._of.pop(request_id))
        for new in (*step.scheduled_new_reqs, *step.scheduled_resumed_reqs):
            seat = self._of.setdefault(new.request_id, -1)
            if seat < 0:
                seat = self._of[new.request_id] = self._free.pop()
            self._num_blocks[seat] = 0
            self._extend(seat, requests[new.request_id].block_ids)
        for diff in step.scheduled_cached_reqs:
            self._extend(self._of[diff.request_id], diff.new_block_ids)

    def _extend(self, seat: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            start = int(self._num_blocks[seat])
            self._num_blocks[seat] = end = start + len(block_ids)
            self._tables[seat, start:end] = block_ids

    def tables(self, seats: NDArray[np.int64], width: int) -> NDArray[np.int32]:
        """Block tables `[len(seats), width]`; what is behind the end of one is arbitrary."""
        return self._tables[seats, :width]
