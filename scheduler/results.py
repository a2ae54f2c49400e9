"""What does it mean that a step has been computed?

In this order: blocks that could not be loaded, tokens that were sampled, transfers that ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
            if request.request_id in drafts:
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
        state, block_size = self._state, self._state.kv.config.block_size
        cut = []
        for request in [*state.skipped_waiting.waiting_for(Wait.REMOTE_KVS), *state.running]:
            index = next((i for i, b in enumerate(request.block_ids) if b in invalid), None)
            if index is None:
                continue
            cut.append(request)
            state.kv.forget_uncomputed(request, index * block_size)
            request.num_computed_tokens = min(request.num_computed_tokens, index * block_size)
            if request.status is RequestStatus.RUNNING:
                self._drop_results(request)
            else:
                state.failed_loads.add(request.request_id)
        return cut

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
            state.skipped_waiting.put(request, Wait.TURN)
            return None
        state.leave_queue(request)
        state.finish(request, status)
        return RequestUpdate(request, (), len(request.output_token_ids), True)
