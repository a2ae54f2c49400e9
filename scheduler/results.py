"""What does it mean that a step has been computed?

In this order: blocks that could not be loaded, tokens that were sampled, transfers that ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from protocol import KVConnectorOutput, TokenLogprobs
from scheduler.failed_loads import FailedLoads
from scheduler.output import ModelRunnerOutput, RequestUpdate
from scheduler.request import Request, RequestStatus
from scheduler.state import Hold, SchedulerState
from scheduler.step_in_flight import StepInFlight


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
            steps = (self._step, *self._later)
            failed = FailedLoads(self._state, steps).cut(transfers.invalid_block_ids)
        updates = self._append_sampled(output)
        if any(update.finished for update in updates):
            self._state.running = [r for r in self._state.running if not r.status.finished]
        if self._state.config.kv_load_failure_policy == "fail":
            updates += [self._state.end_with_error(request) for request in failed]
        if transfers is not None:
            updates += self._end_transfers(transfers)
        return updates

    # ------------------------------------------------------------------ tokens

    def _append_sampled(self, output: ModelRunnerOutput) -> list[RequestUpdate]:
        updates = []
        drafts = self._step.output.scheduled_spec_tokens
        void = self._step.void
        for request in self._step.requests:
            sampled = output.sampled_token_ids.get(request.request_id)
            if not sampled or request.status.finished or request in void:
                continue  # in the middle of its prompt, or ended while the step ran
            request.num_output_placeholders -= 1
            # One that had to start over meanwhile has nothing computed any more.
            if request.request_id in drafts and request.status is RequestStatus.RUNNING:
                num_rejected = len(drafts[request.request_id]) + 1 - len(sampled)
                request.num_computed_tokens -= num_rejected
            logprobs = output.logprobs.get(request.request_id, ())
            updates.append(self._append(request, sampled, logprobs))
        return updates

    def _append(
        self, request: Request, sampled: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> RequestUpdate:
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
        return RequestUpdate(request, new, position, status is not None, logprobs[: len(new)])

    def _take_tokens(self, request: Request, tokens: Iterable[int]) -> RequestStatus | None:
        """Append up to the token that ends the request, if one does."""
        for token_id in tokens:
            request.append_output(token_id)
            status = request.finishing_status(self._state.max_len)
            if status is not None:
                return status
        return None

    # ------------------------------------------------------------------ transfers

    def _end_transfers(self, output: KVConnectorOutput) -> Iterator[RequestUpdate]:
        assert self._state.connector is not None
        self._state.connector.update_connector_output(output)
        for request_id, tokens in output.finished_recving.items():
            update = self._finish_recving(request_id, tokens)
            if update is not None:
                yield update
        for request_id in output.revoked_recving:
            self._state.unpark(request_id)
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
