"""What has to be taken back when blocks turn out not to hold what was to be loaded into them?

    table of a request    | hit | loaded ...... X ...... | computed in the step | planned since |
                                                ^ the first bad block
    computed tokens       |  stay              | do not count: the rest was computed from X

Everybody whose table has the block is cut there: the request that loaded it, and those that hit it
meanwhile. What follows the bad block can be hit no longer, also where its owner has ended or has
lost it since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from scheduler.queue import Wait
from scheduler.request import Request, RequestStatus
from scheduler.state import SchedulerState
from scheduler.step_in_flight import StepInFlight


class FailedLoads:
    """Takes back, while the results of the first of `steps` are processed."""

    def __init__(self, state: SchedulerState, steps: Sequence[StepInFlight]) -> None:
        self._state = state
        self._steps = steps
        self._block_size = state.kv.config.block_size

    def cut(self, invalid: frozenset[int]) -> list[Request]:
        """The requests that relied on these blocks; they have not computed what follows.

        A request that was loading while it ran has computed, and sampled, from what is not there.
        """
        state = self._state
        loading = state.skipped_waiting.waiting_for(Wait.REMOTE_KVS)
        waiting_or_running = [*loading, *state.loaded(), *state.running]
        cut = [request for request in waiting_or_running if self._cut(request, invalid)]
        for request in state.held():
            index = _first_of(invalid, request.block_ids)
            if index is not None:
                state.kv.forget_uncomputed(request, index * self._block_size)
        self._forget_given_up(invalid)
        return cut

    def _cut(self, request: Request, invalid: frozenset[int]) -> bool:
        """Whether the request relied on any of these blocks."""
        index = _first_of(invalid, request.block_ids)
        if index is None or index * self._block_size >= self._num_computed_then(request):
            return False  # it got the block since, after another one had given it up
        self._state.kv.forget_uncomputed(request, index * self._block_size)
        request.num_computed_tokens = index * self._block_size
        if request.status is RequestStatus.RUNNING:
            self._drop_results(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._state.failed_loads.add(request.request_id)
        return True

    def _num_computed_then(self, request: Request) -> int:
        """Without the steps that were planned since."""
        since = (
            step.output.num_scheduled_tokens[request.request_id]
            for step in self._steps[1:]
            if request in step.requests
        )
        return request.num_computed_tokens - sum(since)

    def _forget_given_up(self, invalid: frozenset[int]) -> None:
        """Requests that lost their blocks while the step ran leave nothing in the cache.

        What was sampled for those that have to start over does not count either.
        """
        for request, table, num_computed in self._admitted():
            index = _first_of(invalid, table)
            if index is None or index * self._block_size >= num_computed:
                continue
            self._state.kv.pool.forget_unused(table[index:])
            if request.status is RequestStatus.PREEMPTED:
                self._drop_results(request)

    def _admitted(self) -> Iterator[tuple[Request, Sequence[int], int]]:
        """Who was admitted in the steps in flight: with which blocks, and how much was there."""
        for number, step in enumerate(self._steps):
            output = step.output
            told = {
                data.request_id: data
                for data in (*output.scheduled_new_reqs, *output.scheduled_resumed_reqs)
            }
            for request in step.requests:
                data = told.get(request.request_id)
                if data is not None:
                    appended = self._appended_later(request, number)
                    table = [*data.block_ids, *chain.from_iterable(appended)]
                    yield request, table, data.num_computed_tokens

    def _appended_later(self, request: Request, number: int) -> Iterator[Sequence[int]]:
        """Blocks that the request got in the steps after this one."""
        for step in self._steps[number + 1 :]:
            if request in step.requests:
                for diff in step.output.scheduled_cached_reqs:
                    if diff.request_id == request.request_id:
                        yield diff.new_block_ids

    def _drop_results(self, request: Request) -> None:
        request.num_output_placeholders = 0
        request.spec_token_ids = ()
        for step in self._steps:
            step.void.add(request)


def _first_of(invalid: frozenset[int], table: Sequence[int]) -> int | None:
    """Index of the first of these blocks in a block table."""
    return next((index for index, block_id in enumerate(table) if block_id in invalid), None)
