"""Which tokens are computed this step?

There is no prefill phase and no decode phase. Each request has `num_computed_tokens` and
`num_tokens`, and a step lets the first catch up with the second, within a token budget, a number
of seats and a pool of blocks:

    schedule()             running requests first, in order; then waiting ones are admitted
    (the runner computes)
    update_from_output()   sampled tokens are appended, ended requests are freed, loads are noted

    new ──► waiting ─────────────► running ──► finished
               │ ▲  ▲                 │
               │ │  └── preempted ────┘
               ▼ │
         skipped_waiting    passed over for a reason of their own: remote KV under way, the
                            connector does not know yet, too much is parked already

The semantics are those of vLLM's V1 scheduler. No clock, no I/O, no threads: time and the order of
arrival are inputs, so the same object runs in a live node and under a virtual clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from protocol import BlockCounts, KVConnectorOutput, PromptTooLong, SchedulerConnector
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import ModelRunnerOutput, SchedulerOutput
from scheduler.queue import RequestQueue, make_queue
from scheduler.request import Request, RequestStatus
from scheduler.stats import SchedulerStats
from scheduler.step import Step


@dataclass(frozen=True)
class RequestUpdate:
    """New output tokens of a request; the first of them is output token number `position`."""

    request: Request
    new_token_ids: Sequence[int]
    position: int
    finished: bool


@dataclass(frozen=True)
class Admission:
    """What a waiting request would start with."""

    prefix: Sequence[int] = ()  # blocks of the local prefix hit
    num_local_tokens: int = 0
    num_external_tokens: int = 0
    load_async: bool = False

    @property
    def num_computed_tokens(self) -> int:
        return self.num_local_tokens + self.num_external_tokens


class _Verdict(enum.Enum):
    """What became of a waiting request that was looked at."""

    STARTED = enum.auto()
    PASSED_OVER = enum.auto()  # for a reason of its own: it goes to `skipped_waiting`
    NO_ROOM = enum.auto()  # it ends admission


class Scheduler:
    """Decides, step by step, how many tokens of which request are computed.

    The caller alternates `schedule` and `update_from_output`; `add_request` and `finish_requests`
    may come at any time between these calls.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        connector: SchedulerConnector | None = None,
    ) -> None:
        self.config = config
        self.kv = KVCacheManager(cache_config, config.max_model_len)
        self.stats = SchedulerStats()
        self._connector = connector
        self.requests: dict[str, Request] = {}  # ended ones too, while their blocks are held
        self.running: list[Request] = []
        self.waiting: RequestQueue = make_queue(config.policy)
        self.skipped_waiting: RequestQueue = make_queue(config.policy)
        # A request that would fill the whole pool ends there: alone, it would wait for ever.
        self._max_len = min(config.max_model_len, cache_config.num_usable_tokens)
        self._finished_req_ids: list[str] = []
        self._finished_recving: set[str] = set()  # loads that ended, not yet taken up
        self._parked: dict[str, int] = {}  # blocks being loaded, by request id

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        """Enqueue a request.

        Raises:
            PromptTooLong: it could never be computed, so it would block the queue for ever.
        """
        assert request.request_id not in self.requests, f"{request.request_id} is here already"
        self.check_fits(request.num_tokens)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def check_fits(self, num_tokens: int) -> None:
        """Raise PromptTooLong if so many tokens given at once can never be computed here."""
        limits = [
            (self.config.max_model_len, "max_model_len"),
            (self.kv.config.num_usable_tokens, "the KV cache of this node"),
        ]
        if not self.config.enable_chunked_prefill and not self.config.long_prefill_token_threshold:
            limits.append((self.config.token_budget, "a step without chunked prefill"))
        limit, what = min(limits)
        if num_tokens > limit:
            raise PromptTooLong("prompt", num_tokens, limit, what)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (abort, error). Unknown and ended ids are passed over."""
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.status.finished:
                continue
            self._leave_queue(request)
            loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            # A load that is under way may still write into the blocks.
            self._finish(request, status, hold=loading and request_id in self._parked)
            ended.append(request)
        return ended

    def has_requests(self) -> bool:
        return bool(self.requests)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> SchedulerOutput:
        """Give out the tokens of the next step."""
        step = Step(self.kv, self.requests, self.config.token_budget)
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        return self._finish_step(step)

    def _schedule_running(self, step: Step) -> None:
        index = 0
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            num_new = min(
                self._capped(request.num_tokens - request.num_computed_tokens),
                step.budget,
                self.config.max_model_len - request.num_computed_tokens,
            )
            if num_new == 0:
                index += 1
                continue
            num_preempted = len(step.preempted)
            fresh = self._allocate_or_preempt(request, num_new, step)
            if fresh is None:
                break  # it preempted itself: nobody behind it gets anything in this step
            step.continue_request(request, num_new, fresh)
            if len(step.preempted) > num_preempted:
                index = self.running.index(request)  # a victim may have stood in front of it
            index += 1

    def _allocate_or_preempt(
        self, request: Request, num_new: int, step: Step
    ) -> Sequence[int] | None:
        while True:
            fresh = self.kv.allocate_slots(request, num_new)
            if fresh is not None:
                return fresh
            if self._revoke_pin():
                continue
            victim = self._choose_victim()
            if victim is request and self._take_from_loaded(step):
                continue
            self._preempt(victim, step)
            if victim is request:
                return None

    def _take_from_loaded(self, step: Step) -> bool:
        """Let the last of the loaded requests start over, if only those hold what is lacking.

        A request that is alone would else preempt itself, start over, and get no further.
        """
        loaded = self._loaded() if len(self.running) == 1 else []
        if not loaded:
            return False
        self._preempt(loaded[-1], step)
        return True

    def _choose_victim(self) -> Request:
        if self.config.policy == "priority":
            return max(self.running, key=lambda r: (r.priority, r.arrival_time))
        return self.running[-1]

    def _preempt(self, victim: Request, step: Step) -> None:
        """Take the blocks of a request that runs, or that is loaded and waits.

        It keeps its tokens, and starts over when there is room.
        """
        self._leave_queue(victim)
        if step.withdraw(victim):
            # Its blocks were made hittable for tokens that will not be computed now.
            self.kv.forget_uncomputed(victim, victim.num_computed_tokens)
        self.kv.free(victim.request_id)
        self._finished_recving.discard(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.put_back([victim])
        step.preempted.append(victim.request_id)

    def _admit_waiting(self, step: Step) -> None:
        self._admit_in_order(step)
        # Nothing runs that could free blocks, so nobody may hold any and wait behind the others.
        while not self.running and (loaded := self._loaded()):
            if self._admit_one_of(loaded, step):
                return
            self._preempt(loaded[-1], step)
            self._admit_in_order(step)

    def _admit_in_order(self, step: Step) -> None:
        passed_over: list[Request] = []
        while step.budget > 0 and len(self.running) < self.config.max_num_seqs:
            queue = self._next_queue()
            if queue is None:
                break
            request = queue.peek()
            verdict = self._admit(request, step)
            if verdict is _Verdict.NO_ROOM:
                break  # whoever is behind it would only take the room that it waits for
            queue.pop()
            if verdict is _Verdict.PASSED_OVER:
                passed_over.append(request)
        self.skipped_waiting.put_back(passed_over)

    def _admit(self, request: Request, step: Step) -> _Verdict:
        admission = self._prepare(request)
        if admission is None:
            return _Verdict.PASSED_OVER
        num_new = self._num_admitted(request, admission, step.budget)
        if num_new is None or self._allocate_waiting(request, admission, num_new) is None:
            return _Verdict.NO_ROOM
        self._note_loading(request, admission)
        if admission.load_async:
            self._park(request, admission)
            return _Verdict.PASSED_OVER
        self._start(request, admission, num_new, step)
        return _Verdict.STARTED

    def _loaded(self) -> list[Request]:
        """Waiting requests that hold blocks, because their load has ended."""
        return [
            request
            for request in self.skipped_waiting
            if request.num_computed_tokens > 0 and request.request_id not in self._parked
        ]

    def _admit_one_of(self, loaded: Iterable[Request], step: Step) -> bool:
        for request in loaded:
            if self._admit(request, step) is _Verdict.STARTED:
                self.skipped_waiting.remove(request)
                return True
        return False

    def _next_queue(self) -> RequestQueue | None:
        """Skipped requests go first under fcfs; under priority the better head does."""
        queues = [queue for queue in (self.skipped_waiting, self.waiting) if queue]
        if len(queues) == 2 and self.config.policy == "priority":
            return min(queues, key=lambda queue: queue.peek().urgency)
        return queues[0] if queues else None

    def _prepare(self, request: Request) -> Admission | None:
        """What the request would start with, or None if it must be passed over in this step."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and not self._promote(request):
            return None
        if request.num_computed_tokens > 0:  # its load has finished
            return Admission(num_local_tokens=request.num_computed_tokens)
        prefix = self.kv.find_prefix(request)
        num_local = len(prefix) * self.kv.config.block_size
        if self._connector is None:
            return Admission(prefix, num_local)
        num_external, load_async = self._connector.get_num_new_matched_tokens(request, num_local)
        if num_external is None:
            return None
        admission = Admission(prefix, num_local, num_external, load_async and num_external > 0)
        if admission.load_async and not self._may_park(admission):
            return None
        return admission

    def _promote(self, request: Request) -> bool:
        """Take up a request whose load has ended, if it has."""
        if request.request_id not in self._finished_recving:
            return False
        self._finished_recving.remove(request.request_id)
        self.kv.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # no token came with it: compute one for its logits
        preempted = request.num_preemptions > 0
        request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
        return True

    def _num_admitted(self, request: Request, admission: Admission, budget: int) -> int | None:
        """Tokens to compute now; None if all of them must fit into the budget and do not."""
        if admission.load_async:
            return 0
        num_new = self._capped(request.num_tokens - admission.num_computed_tokens)
        if num_new > budget and not self.config.enable_chunked_prefill:
            return None
        return min(num_new, budget)

    def _allocate_waiting(
        self, request: Request, admission: Admission, num_new: int
    ) -> list[int] | None:
        while True:
            fresh = self.kv.allocate_slots(
                request,
                num_new,
                prefix=admission.prefix,
                num_external_tokens=admission.num_external_tokens,
                whole_must_fit=self.config.scheduler_reserve_full_isl,
                delay_caching=admission.load_async,
            )
            if fresh is not None or not self._revoke_pin():
                return fresh

    def _note_loading(self, request: Request, admission: Admission) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = admission.num_local_tokens
        if request.num_computed_tokens == 0:
            self.stats.prefix_queries += request.num_tokens
            self.stats.prefix_hits += admission.num_local_tokens
            self.stats.prompt_loaded += admission.num_external_tokens
        if self._connector is not None and request.num_computed_tokens == 0:
            table = self.kv.block_table(request.request_id)
            self._connector.update_state_after_alloc(request, table, admission.num_external_tokens)

    def _may_park(self, admission: Admission) -> bool:
        """Whether running requests keep enough headroom if this one reserves its blocks too."""
        limit = self.config.max_parked_blocks
        if limit is None or not self._parked:
            return True
        needed = self.kv.blocks_for(admission.num_computed_tokens) - len(admission.prefix)
        return sum(self._parked.values()) + needed <= limit

    def _park(self, request: Request, admission: Admission) -> None:
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = admission.num_computed_tokens
        table = self.kv.block_table(request.request_id)
        self._parked[request.request_id] = len(table) - len(admission.prefix)

    def _start(self, request: Request, admission: Admission, num_new: int, step: Step) -> None:
        resumed = request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = admission.num_computed_tokens
        self.running.append(request)
        step.start_request(request, num_new, resumed)

    def _capped(self, num_new: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        return min(num_new, threshold) if threshold else num_new

    def _finish_step(self, step: Step) -> SchedulerOutput:
        output = step.output
        self.stats.num_steps += bool(output.num_scheduled_tokens)
        output.preempted_req_ids = step.preempted
        output.finished_req_ids = sorted(self._finished_req_ids)
        self._finished_req_ids.clear()
        if self._connector is not None:
            output.kv_connector_metadata = self._connector.build_connector_meta(step)
        for request_id, num_new in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            self._count_prompt_tokens(request, num_new)
            request.num_computed_tokens += num_new
        return output

    def _count_prompt_tokens(self, request: Request, num_new: int) -> None:
        of_prompt = min(num_new, request.num_given_tokens - request.num_computed_tokens)
        if of_prompt > 0:
            self.stats.prompt_computed += of_prompt
            if request.num_preemptions:
                self.stats.prompt_recomputed += of_prompt

    # ------------------------------------------------------------------ a step's results

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Append what was sampled, end what is at its end, take note of finished transfers."""
        updates = []
        for request_id in step.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status.finished:
                continue  # ended while the step ran
            sampled = output.sampled_token_ids.get(request_id)
            if sampled:
                updates.append(self._append(request, sampled))
        if any(update.finished for update in updates):
            self.running = [r for r in self.running if not r.status.finished]
        if output.kv_connector_output is not None:
            updates.extend(self._update_transfers(output.kv_connector_output))
        return updates

    def _append(self, request: Request, sampled: Sequence[int]) -> RequestUpdate:
        position = len(request.output_token_ids)
        status = self._take_tokens(request, sampled)
        new = request.output_token_ids[position:]
        self.stats.generated += len(new)
        if status is not None:
            self._finish(request, status)
        return RequestUpdate(request, new, position, status is not None)

    def _take_tokens(self, request: Request, tokens: Iterable[int]) -> RequestStatus | None:
        """Append up to the token that ends the request, if one does."""
        for token_id in tokens:
            request.append_output(token_id)
            status = request.finishing_status(self._max_len)
            if status is not None:
                return status
        return None

    def _update_transfers(self, output: KVConnectorOutput) -> Iterator[RequestUpdate]:
        assert self._connector is not None
        self._connector.update_connector_output(output)
        for request_id, tokens in output.finished_recving.items():
            update = self._finish_recving(request_id, tokens)
            if update is not None:
                yield update
        for request_id in output.finished_sending:
            self._release_held(request_id)

    def _finish_recving(self, request_id: str, tokens: Sequence[int]) -> RequestUpdate | None:
        self._parked.pop(request_id, None)
        request = self.requests[request_id]
        if request.status.finished:
            self._release_held(request_id)
            return None
        status = self._take_tokens(request, tokens)
        if status is None:
            self._finished_recving.add(request_id)
            return None
        self._leave_queue(request)
        self._finish(request, status)
        return RequestUpdate(request, (), len(request.output_token_ids), True)

    # ------------------------------------------------------------------ endings

    def _leave_queue(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            return
        for queue in (self.skipped_waiting, self.waiting):
            if request in queue:
                queue.remove(request)

    def _finish(self, request: Request, status: RequestStatus, hold: bool = False) -> None:
        """End a request that is in no queue any more; `hold` keeps its blocks in any case."""
        request.status = status
        self._finished_recving.discard(request.request_id)
        self._finished_req_ids.append(request.request_id)
        if self._connector is not None:
            table = self.kv.block_table(request.request_id)
            hold = self._connector.request_finished(request, table) or hold
        if not hold:
            self._release_held(request.request_id)

    def _release_held(self, request_id: str) -> None:
        self.kv.free(request_id)
        del self.requests[request_id]

    def _revoke_pin(self) -> bool:
        """Free the blocks of an ended request that are only kept because nobody took them yet."""
        request_id = self._connector.revoke_pin() if self._connector is not None else None
        if request_id is None:
            return False
        self.stats.num_revoked_pins += 1
        self._release_held(request_id)
        return True

    # ------------------------------------------------------------------ looking in from outside

    def block_counts(self) -> BlockCounts:
        """Where the blocks are. Those of an aborted load are in quarantine until it has ended."""
        pool = self.kv.pool
        quarantined = sum(
            count
            for request_id, count in self._parked.items()
            if self.requests[request_id].status.finished
        )
        return BlockCounts(
            total=pool.num_usable,
            free=pool.num_free,
            cached=pool.num_cached,
            used=pool.num_used - quarantined,
            quarantined=quarantined,
        )

    def queued_tokens(self) -> int:
        """Tokens given with requests that are not computed yet."""
        return sum(
            max(0, request.num_given_tokens - request.num_computed_tokens)
            for request in self.requests.values()
            if not request.status.finished
        )

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        self.kv.pool.check(self.kv.tables())
        assert self.block_counts().balanced
        queued = [*self.running, *self.waiting, *self.skipped_waiting]
        assert len({r.request_id for r in queued}) == len(queued), "a request is queued twice"
        live = {i for i, request in self.requests.items() if not request.status.finished}
        assert {r.request_id for r in queued} == live, "a request is lost or in no queue"
        assert len(self.running) <= self.config.max_num_seqs
