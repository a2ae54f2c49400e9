"""What do running requests get in this step?

They go before those that wait, in the order in which they were admitted. One that lacks a block
takes those of the last (or least urgent) running request, if need be its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.request import Request
from scheduler.state import SchedulerState
from scheduler.step import Step


class RunningPass:
    """Continues running requests in one step."""

    def __init__(self, state: SchedulerState, step: Step) -> None:
        self._state = state
        self._step = step

    def run(self) -> None:
        state, step = self._state, self._step
        index = 0
        while index < len(state.running) and step.budget > 0:
            request = state.running[index]
            num_new = self._num_new_tokens(request)
            if num_new <= 0:
                index += 1
                continue
            num_preempted = len(step.preempted)
            fresh = self._append_or_preempt(request, num_new)
            if fresh is None:
                break  # it preempted itself: nobody behind it gets anything in this step
            step.continue_request(request, num_new, fresh)
            if len(step.preempted) > num_preempted:
                index = state.running.index(request)  # a victim may have stood in front of it
            index += 1

    def _num_new_tokens(self, request: Request) -> int:
        config = self._state.config
        num_computed, num_in_flight = request.num_computed_tokens, request.num_output_placeholders
        if num_in_flight and request.surely_ends(self._state.max_len):
            return 0
        num_new = request.num_tokens_with_spec + num_in_flight - num_computed
        if 0 < config.prefill_threshold < num_new:
            num_new = config.prefill_threshold
        if request.spec_token_ids:  # no draft may take the place of the last token
            num_known = request.num_tokens + num_in_flight
            num_new = min(num_new, max(self._state.max_len - 1, num_known) - num_computed)
        return min(num_new, self._step.budget)

    def _append_or_preempt(self, request: Request, num_new: int) -> Sequence[int] | None:
        state = self._state
        while True:
            fresh = state.kv.append_slots(request, num_new, state.config.num_lookahead_tokens)
            if fresh is not None:
                return fresh
            if state.revoke_pin():
                continue
            victim = self._choose_victim()
            if victim is request and self._take_from_loaded():
                continue
            state.preempt(victim, self._step)
            if victim is request:
                return None

    def _choose_victim(self) -> Request:
        if self._state.config.policy == "priority":
            # Of equals the one that had to give way before does so again: else two that fill the
            # pool could take each other's blocks for ever.
            return max(
                self._state.running, key=lambda r: (r.priority, r.arrival_time, r.num_preemptions)
            )
        return self._state.running[-1]

    def _take_from_loaded(self) -> bool:
        """Let the last of the loaded requests start over, if only those hold what is lacking.

        A request that is alone would else preempt itself, start over, and get no further.
        """
        loaded = self._state.loaded() if len(self._state.running) == 1 else []
        if not loaded:
            return False
        self._state.preempt(loaded[-1], self._step)
        return True
