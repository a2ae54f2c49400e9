"""Which waiting requests start in this step?

They are looked at in the order of the policy. One that lacks a seat, tokens or blocks ends
admission: whoever is behind it would only take the room that it waits for. One that waits for
something of its own is passed over, and stands in `skipped_waiting` from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.queue import Wait
from scheduler.request import Request, RequestStatus
from scheduler.state import PauseState, SchedulerState
from scheduler.step import Step


@dataclass(frozen=True)
class AdmissionPlan:
    """What a waiting request would start with."""

    prefix: Sequence[int] = ()  # blocks of the local prefix hit
    num_local_tokens: int = 0
    num_external_tokens: int = 0
    load_async: bool = False
    after_load: bool = False  # the blocks are its own already

    @property
    def num_computed_tokens(self) -> int:
        return self.num_local_tokens + self.num_external_tokens


class Admission:
    """Admits waiting requests into one step."""

    def __init__(self, state: SchedulerState, step: Step) -> None:
        self._state = state
        self._config = state.config
        self._step = step
        self._closed: set[Wait] = {Wait.REMOTE_KVS, Wait.GRAMMAR, Wait.ASKED}
        self._made_way: set[Request] = set()  # preempted for somebody who was waiting
        self._adapters: set[str] | None = None  # of the step; None: not looked at yet

    def run(self) -> Wait | None:
        """Admit whom there is room for; what the next one lacks, if somebody waits for a turn."""
        if self._state.pause_state is not PauseState.UNPAUSED:
            return Wait.PAUSE if self._next() is not None else None
        if self._step.preempted:
            return Wait.PREEMPTION
        ended_by = self._admit_in_order()
        # Nothing runs that could free blocks, so nobody may hold any and wait behind the others.
        while not self._state.running and (loaded := self._state.loaded()):
            if self._admit_one_of(loaded):
                break
            self._state.preempt(loaded[-1], self._step)
            self._step.admission_ended_at = None
            ended_by = self._admit_in_order()
        for request in self._state.skipped_waiting.waiting_for(Wait.ASKED):
            self._state.skipped_waiting.put(request, Wait.CONNECTOR)
        return ended_by

    def _admit_in_order(self) -> Wait | None:
        while (request := self._next()) is not None:
            wait = self._admit(request)
            if wait is None:
                continue
            if not wait.ends_admission:
                self._pass_over(request, wait)
            elif not self._make_way_for(request, wait):
                self._step.admission_ended_at = request.request_id
                return wait
        return None

    def _admit_one_of(self, loaded: Iterable[Request]) -> bool:
        return any(self._admit(request) is None for request in loaded)

    # ------------------------------------------------------------------ whose turn it is

    def _next(self) -> Request | None:
        """Skipped requests go first under fcfs; under priority the better of the two does."""
        skipped = self._state.skipped_waiting.first(self._is_open)
        waiting = self._state.waiting.peek() if self._state.waiting else None
        if skipped is None or waiting is None:
            return skipped or waiting
        if self._config.policy == "priority":
            return min(skipped, waiting, key=lambda request: request.urgency)
        return skipped

    def _is_open(self, wait: Wait, lora_name: str | None) -> bool:
        if wait is Wait.LORA:
            return self._has_room_for_adapter(lora_name)
        return wait not in self._closed

    def _pass_over(self, request: Request, wait: Wait) -> None:
        if request not in self._state.skipped_waiting:
            self._state.waiting.remove(request)
        if wait is Wait.CONNECTOR:
            wait = Wait.ASKED
        elif wait is not Wait.LORA:
            self._closed.add(wait)
        self._state.skipped_waiting.put(request, wait)

    # ------------------------------------------------------------------ one request

    def _admit(self, request: Request) -> Wait | None:
        """Start the request, or its load; or else say what it lacks."""
        if request in self._made_way or request.num_output_placeholders:
            return Wait.PREEMPTION  # a step in flight may still sample its next token
        if len(self._state.running) >= self._config.max_num_seqs:
            return Wait.SEAT
        if self._step.budget <= 0:
            return Wait.TOKENS
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._promote(request)
        if not self._has_room_for_adapter(request.lora_name):
            return Wait.LORA
        plan = self._plan(request)
        if isinstance(plan, Wait):
            return plan
        num_left = request.num_tokens - plan.num_computed_tokens
        num_new = 0 if plan.load_async else self._num_admitted(num_left, self._step.budget)
        if isinstance(num_new, Wait):
            return num_new
        if not self._allocate(request, plan, num_new):
            return Wait.BLOCKS
        self._note_start(request, plan)
        if plan.load_async:
            self._park(request, plan)
        else:
            self._start(request, plan, num_new)
        return None

    def _promote(self, request: Request) -> None:
        """Take up a request whose load has ended."""
        state = self._state
        if request.request_id in state.failed_loads and request.num_computed_tokens == 0:
            state.free_loaded(request)  # nothing came; on another try it may hit something here
        state.failed_loads.discard(request.request_id)
        state.kv.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # no token came with it: compute one for its logits
        preempted = request.num_preemptions > 0
        request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING

    def _plan(self, request: Request) -> AdmissionPlan | Wait:
        """What the request would start with, or why it must be passed over in this step."""
        if request.block_ids:  # its load has finished
            return AdmissionPlan(num_local_tokens=request.num_computed_tokens, after_load=True)
        kv, connector = self._state.kv, self._state.connector
        prefix = kv.find_prefix(request)
        num_local = len(prefix) * kv.config.block_size
        if connector is None:
            return AdmissionPlan(prefix, num_local)
        num_external, load_async = connector.get_num_new_matched_tokens(request, num_local)
        if num_external is None:
            return Wait.CONNECTOR
        plan = AdmissionPlan(prefix, num_local, num_external, load_async and num_external > 0)
        if plan.load_async and not self._may_park(plan):
            self._state.ask_back(request)
            return Wait.PARKING
        return plan

    def _num_admitted(self, num_left: int, budget: int) -> int | Wait:
        """Tokens to compute now, of those left; or why none."""
        threshold = self._config.prefill_threshold
        num_new = min(num_left, threshold) if threshold else num_left
        if num_new > budget and not self._config.enable_chunked_prefill:
            return Wait.TOKENS
        num_new = min(num_new, budget)
        if num_new < num_left and self._config.limits_partial_prefills:
            return self._partial_prefill_wait(num_left) or num_new
        return num_new

    def _allocate(self, request: Request, plan: AdmissionPlan, num_new: int) -> bool:
        # A request without computed tokens gets no lookahead slots, even with a prefix hit.
        lookahead = self._config.num_lookahead_tokens if request.num_computed_tokens else 0
        while not self._state.kv.allocate_slots(
            request,
            num_new,
            prefix=plan.prefix,
            num_external_tokens=plan.num_external_tokens,
            num_lookahead_tokens=lookahead,
            whole_must_fit=self._config.scheduler_reserve_full_isl,
            delay_caching=plan.load_async,
        ):
            if not self._state.revoke_pin():
                self._state.ask_back(request)
                return False
        return True

    def _note_start(self, request: Request, plan: AdmissionPlan) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = plan.num_local_tokens
        if plan.after_load:
            return  # it was noted when the load began
        stats = self._state.stats
        stats.prefix_queries += request.num_tokens
        stats.prefix_hits += plan.num_local_tokens
        stats.prompt_loaded += plan.num_external_tokens
        if self._state.connector is not None:
            self._state.connector.update_state_after_alloc(
                request, request.block_ids, plan.num_external_tokens
            )

    def _park(self, request: Request, plan: AdmissionPlan) -> None:
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = plan.num_computed_tokens
        num_blocks = len(request.block_ids) - len(plan.prefix)
        self._state.parked[request.request_id] = num_blocks
        self._pass_over(request, Wait.REMOTE_KVS)

    def _start(self, request: Request, plan: AdmissionPlan, num_new: int) -> None:
        state = self._state
        state.leave_queue(request)
        resumed = request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = plan.num_computed_tokens
        request.num_prefill_tokens = request.num_tokens
        state.running.append(request)
        if self._adapters is not None and request.lora_name is not None:
            self._adapters.add(request.lora_name)
        self._step.start_request(request, num_new, resumed)

    # ------------------------------------------------------------------ limits of its own

    def _may_park(self, plan: AdmissionPlan) -> bool:
        """Whether running requests keep enough headroom if this one reserves its blocks too."""
        limit, parked = self._config.max_parked_blocks, self._state.parked
        if limit is None or not parked:
            return True
        needed = self._state.kv.blocks_for(plan.num_computed_tokens) - len(plan.prefix)
        return sum(parked.values()) + needed <= limit

    def _has_room_for_adapter(self, lora_name: str | None) -> bool:
        if self._config.max_loras is None or lora_name is None:
            return True
        if self._adapters is None:
            # All that run, not only those that compute now: one that seems to be at its end may go
            # on, if a load that it relied on turns out to have failed.
            running = self._state.running
            self._adapters = {r.lora_name for r in running if r.lora_name is not None}
        return lora_name in self._adapters or len(self._adapters) < self._config.max_loras

    def _partial_prefill_wait(self, num_left: int) -> Wait | None:
        """Whether a prefill that is not finished in this step, with so many tokens left, may not
        start: too many like it run already, be it that this step has no tokens for them.
        """
        config, num_scheduled = self._config, self._step.num_scheduled
        left = [
            request.num_prefill_tokens - request.num_computed_tokens
            for request in self._state.running
            if request.num_computed_tokens + num_scheduled.get(request.request_id, 0)
            < request.num_prefill_tokens
        ]
        long = sum(number > config.prefill_threshold for number in left)
        max_long, max_partial = config.max_long_partial_prefills, config.max_num_partial_prefills
        if max_long is not None and num_left > config.prefill_threshold and long >= max_long:
            return Wait.LONG_PREFILL
        if max_partial is not None and len(left) >= max_partial:
            return Wait.PARTIAL_PREFILL
        return None

    # ------------------------------------------------------------------ preempting for it

    def _make_way_for(self, request: Request, wait: Wait) -> bool:
        """Preempt one running request of strictly lower priority, if that will be enough."""
        if not self._config.waiting_preempts_running or wait not in (Wait.SEAT, Wait.BLOCKS):
            return False
        outranked = [r for r in self._state.running if self._may_make_way(r, request)]
        if not outranked or not self._would_fit(request, outranked):
            return False
        victim = max(outranked, key=lambda r: (r.priority, r.arrival_time))
        if wait is Wait.SEAT and not self._lacks_only_a_seat(request, victim):
            return False  # else the victim would start over in each step, for nothing
        self._state.preempt(victim, self._step)
        self._made_way.add(victim)
        return True

    def _may_make_way(self, running: Request, request: Request) -> bool:
        """Never one on whose tokens of this step somebody else relies."""
        return running.priority > request.priority and not self._state.kv.uncomputed_are_shared(
            running, running.num_computed_tokens
        )

    def _lacks_only_a_seat(self, request: Request, victim: Request) -> bool:
        """Whether the request would start at once in the victim's place, as far as limits go."""
        if not self._has_room_for_adapter(request.lora_name):
            return False
        plan = self._plan(request)
        if isinstance(plan, Wait):
            return False
        if plan.load_async:
            return True
        budget = self._step.budget + self._step.num_scheduled.get(victim.request_id, 0)
        num_left = max(1, request.num_tokens - plan.num_computed_tokens)
        return budget > 0 and not isinstance(self._num_admitted(num_left, budget), Wait)

    def _would_fit(self, request: Request, without: Sequence[Request]) -> bool:
        kv = self._state.kv
        prefix = [] if request.block_ids else kv.find_prefix(request)
        num_held = len(request.block_ids) + len(prefix)
        return kv.blocks_for(request.num_tokens) - num_held <= kv.room_without(without, prefix)
