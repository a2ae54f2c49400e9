"""What does it mean that a step has been computed?

In this order: blocks that could not be loaded, tokens that were sampled, transfers that ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from protocol import KVConnectorOutput
from scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from scheduler.queue import Wait
from scheduler.request import Request, RequestStatus
from scheduler.state import Hold, SchedulerState


@dataclass
class StepInFlight:
    """A step that the runner has, and whose results are not known yet.

    It names requests by identity: an id may be used again while the step runs.
    """

    output: SchedulerOutput
    requests: list[Request]
    void: set[Request] = field(default_factory=set)  # whose results do not count


class Results:
    """Applies the results of one step."""

    def __init__(
        self, state: SchedulerState, step: StepInFlight, later: Iterable[StepInFlight]
    ) -> None:
        self._state = state
        self._step = step
        self._later = later  # steps that were planned since
        self._block_size = state.kv.config.block_size

    def apply(self, output: ModelRunnerOutput) -> list[RequestUpdate]:
        transfers = output.kv_connector_output
        failed: list[Request] = []
        if transfers is not None and transfers.invalid_block_ids:
            failed = self._cut_loads(transfers.invalid_block_ids)
        updates = self._append_sampled(output.sampled_token_ids)
        if any(update.finished for update in updates):
            self._state.running = [r for r in self._state.running if not r.status.finished]
        if self._state.config.kv_load_failure_policy == "fail":
            updates += [self._state.end_with_error(request) for request in failed]
        if transfers is not None:
            updates += self._end_transfers(transfers)
        return updates

    # ------------------------------------------------------------------ tokens

    def _append_sampled(
        self, sampled_token_ids: Mapping[str, Sequence[int]]
    ) -> list[RequestUpdate]:
        updates = []
        drafts = self._step.output.scheduled_spec_tokens
        void = self._step.void
        for request in self._step.requests:
            sampled = sampled_token_ids.get(request.request_id)
            if not sampled or request.status.finished or request in void:
                continue  # in the middle of its prompt, or ended while the step ran
            request.num_output_placeholders -= 1
            # One that had to start over meanwhile has nothing computed any more.
            if request.request_id in drafts and request.status is RequestStatus.RUNNING:
                num_rejected = len(drafts[request.request_id]) + 1 - len(sampled)
                request.num_computed_tokens -= num_rejected
            updates.append(self._append(request, sampled))
        return updates

    def _append(self, request: Request, sampled: Sequence[int]) -> RequestUpdate:
        position = len(request.output_token_ids)
        status = self._take_tokens(request, sampled)
        new = request.output_token_ids[position:]
        self._state.stats.generated += len(new)
        if status is not None:
            if request.status is not RequestStatus.RUNNING:  # preempted while the step ran
                self._state.leave_queue(request)
            else:
                # Tokens that were not known when the step was planned are in full blocks now. The
                # last one was sampled, not computed.
                num_known = min(request.num_computed_tokens, request.num_tokens - 1)
                self._state.kv.cache_blocks(request, num_known)
            self._state.finish(request, status)
        return RequestUpdate(request, new, position, status is not None)

    def _take_tokens(self, request: Request, tokens: Iterable[int]) -> RequestStatus | None:
        """Append up to the token that ends the request, if one does."""
        for token_id in tokens:
            request.append_output(token_id)
            status = request.finishing_status(self._state.max_len)
            if status is not None:
                return status
        return None

    # ------------------------------------------------------------------ loads that failed

    def _cut_loads(self, invalid: frozenset[int]) -> list[Request]:
        """Requests that rely on these blocks have computed nothing from the first of them on.

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
        """Take back what the request computed from these blocks; whether it relied on any."""
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
            for step in self._later
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
        steps = (self._step, *self._later)
        for number, step in enumerate(steps):
            output = step.output
            told = {
                data.request_id: data
                for data in (*output.scheduled_new_reqs, *output.scheduled_resumed_reqs)
            }
            for request in step.requests:
                data = told.get(request.request_id)
                if data is not None:
                    appended = (
                        diff.new_block_ids
                        for later in steps[number + 1 :]
                        if request in later.requests
                        for diff in later.output.scheduled_cached_reqs
                        if diff.request_id == request.request_id
                    )
                    table = [*data.block_ids, *chain.from_iterable(appended)]
                    yield request, table, data.num_computed_tokens

    def _drop_results(self, request: Request) -> None:
        request.num_output_placeholders = 0
        request.spec_token_ids = ()
        for step in (self._step, *self._later):
            step.void.add(request)

    # ------------------------------------------------------------------ transfers

    def _end_transfers(self, output: KVConnectorOutput) -> Iterator[RequestUpdate]:
        assert self._state.connector is not None
        self._state.connector.update_connector_output(output)
        for request_id, tokens in output.finished_recving.items():
            update = self._finish_recving(request_id, tokens)
            if update is not None:
                yield update
        for request_id in output.finished_sending:
            self._state.release(request_id, Hold.SENDING)

    def _finish_recving(self, request_id: str, tokens: Sequence[int]) -> RequestUpdate | None:
        state = self._state
        del state.parked[request_id]
        request = state.requests[request_id]
        if request.status.finished:
            state.release(request_id, Hold.LOADING)
            return None
        status = self._take_tokens(request, tokens)
        if status is None:
            state.end_load(request)
            return None
        state.leave_queue(request)
        state.finish(request, status)
        return RequestUpdate(request, (), len(request.output_token_ids), True)


def _first_of(invalid: frozenset[int], table: Sequence[int]) -> int | None:
    """Index of the first of these blocks in a block table."""
    return next((index for index, block_id in enumerate(table) if block_id in invalid), None)
