"""Which tokens are computed this step?

There is no prefill phase and no decode phase. Each request has `num_computed_tokens` and
`num_tokens`, and a step lets the first catch up with the second, within a token budget, a number
of seats and a pool of blocks:

    schedule()             running requests first, in order (running.py);
                           then waiting ones are admitted (admission.py)
    (the runner computes)
    update_from_output()   sampled tokens are appended, ended requests are freed, loads are noted
                           (results.py)

    new ──► waiting ─────────────► running ──► finished
               │ ▲  ▲                 │
               │ │  └── preempted ────┘
               ▼ │
         skipped_waiting    passed over for a reason of their own: remote KV under way, the
                            connector does not know yet, no adapter or grammar yet, ...

Step n+1 may be planned before the results of step n are known, if the runner computes steps in the
order in which they were planned: a token that a step in flight samples is a placeholder until then.

The semantics are those of vLLM's V1 scheduler; docs/scheduler.md lists where it differs. No clock,
no I/O, no threads: time and the order of arrival are inputs, so the same object runs in a live node
and under a virtual clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from protocol import BlockCounts, InvalidRequest, PromptTooLong, SchedulerConnector
from scheduler.admission import Admission
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from scheduler.queue import RequestQueue, SkippedQueue, Wait
from scheduler.request import Request, RequestStatus
from scheduler.results import Results
from scheduler.running import RunningPass
from scheduler.state import PauseState, SchedulerState
from scheduler.stats import SchedulerStats
from scheduler.step import Step
from scheduler.step_in_flight import StepInFlight

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """Decides, step by step, how many tokens of which request are computed.

    The caller alternates `schedule` and `update_from_output`, the second at most one step behind;
    the other methods may be called at any time between these.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        connector: SchedulerConnector | None = None,
    ) -> None:
        self.config = config
        self._state = SchedulerState(config, cache_config, connector)
        self._in_flight: deque[StepInFlight] = deque()
        self._preempted_meanwhile: list[str] = []  # since the last step

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        """Enqueue a request.

        Raises:
            PromptTooLong: it could never be computed, so it would block the queue for ever.
            InvalidRequest: it may not end before more tokens than it can have.
        """
        state = self._state
        assert request.request_id not in state.requests, f"{request.request_id} is here already"
        num_forced, min_tokens = request.num_forced_tokens, request.sampling.min_tokens
        self.check_fits(request.num_prompt_tokens, num_forced, min_tokens)
        state.requests[request.request_id] = request
        if request.status is RequestStatus.WAITING:
            state.waiting.add(request)
        else:
            state.skipped_waiting.put(request, Wait.GRAMMAR)

    def check_fits(
        self, num_prompt_tokens: int, num_forced_tokens: int = 0, min_tokens: int = 0
    ) -> None:
        """Raise what `add_request` would raise for such a request."""
        limits = [
            (self.config.max_model_len, "max_model_len"),
            (self.kv.config.num_usable_tokens, "the KV cache of this node"),
        ]
        limit, what = min(limits, key=lambda entry: entry[0])
        if num_prompt_tokens + num_forced_tokens > limit:
            raise PromptTooLong("prompt", num_prompt_tokens + num_forced_tokens, limit, what)
        room = self._state.max_len - num_prompt_tokens
        # A request whose prompt takes all the room gets one token nevertheless.
        if min_tokens > max(room, 1):
            raise InvalidRequest("min_tokens", f"must be at most {room} after this prompt")

    def grammar_ready(self, request_id: str) -> None:
        """The grammar of a request that awaits one is compiled. Unknown ids are passed over."""
        request = self.requests.get(request_id)
        awaits = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if request is not None and request.status is awaits:
            request.status = RequestStatus.WAITING
            self._state.skipped_waiting.put(request, Wait.TURN)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (abort, error). Unknown and ended ids are passed over."""
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.status.finished:
                self._state.leave_queue(request)
                self._state.finish(request, status)
                ended.append(request)
        return ended

    # ------------------------------------------------------------------ a step

    def schedule(self) -> SchedulerOutput:
        """Give out the tokens of the next step."""
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "results of earlier steps are missing"
        paused = self._state.pause_state is PauseState.PAUSED_ALL
        step = Step(0 if paused else self.config.token_budget, self._preempted_meanwhile)
        self._preempted_meanwhile = []
        RunningPass(self._state, step).run()
        step.admission_ended_by = Admission(self._state, step).run()
        return self._launch(step)

    def _launch(self, step: Step) -> SchedulerOutput:
        """From here on the tokens of the step count as computed."""
        state, output = self._state, step.as_output()
        state.stats.num_steps += bool(step.num_scheduled)
        output.finished_req_ids = sorted(state.finished_req_ids)
        state.finished_req_ids.clear()
        if state.connector is not None:
            output.kv_connector_metadata = state.connector.build_connector_meta(step)
        requests = list(step.requests.values())
        for request, num_new in zip(requests, step.num_scheduled.values(), strict=True):
            if request.num_computed_tokens < request.num_given_tokens:
                output.num_prompt_tokens += self._count_prompt_tokens(request, num_new)
            request.num_computed_tokens += num_new
            num_wanted = request.num_tokens + request.num_output_placeholders
            if request.num_computed_tokens >= num_wanted:
                request.num_output_placeholders += 1  # its last token is computed: it will sample
        self._in_flight.append(StepInFlight(output, requests))
        return output

    def _count_prompt_tokens(self, request: Request, num_new: int) -> int:
        of_prompt = min(num_new, request.num_given_tokens - request.num_computed_tokens)
        self.stats.prompt_computed += of_prompt
        if request.num_preemptions:
            self.stats.prompt_recomputed += of_prompt
        return of_prompt

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Append what was sampled, end what is at its end, take note of finished transfers."""
        computed = self._in_flight.popleft()
        assert computed.output is step, "steps end in the order in which they were planned"
        return Results(self._state, computed, self._in_flight).apply(output)

    def update_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Tokens that may follow; the next step computes them to see whether they do.

        Ignored for requests in the middle of their prompt, and for those that ended meanwhile.
        """
        for request_id, draft in drafts.items():
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                request.spec_token_ids = () if request.prefilling else tuple(draft)

    # ------------------------------------------------------------------ pause and reset

    @property
    def pause_state(self) -> PauseState:
        return self._state.pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """From the next step on. Requests may be added and ended meanwhile."""
        self._state.pause_state = pause_state

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Decide by this configuration from the next step on. No request may be queued.

        What is cached can be hit, and what is held is held, as before: so the longest request and
        the way of drafting have to stay as they are.
        """
        now, state = self.config, self._state
        assert config.max_model_len == now.max_model_len, "blocks are sized for the longest request"
        assert config.spec_method == now.spec_method, "it decides what can be hit"
        state.reconfigure(config)
        self.config = config

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget everything that can be hit, as after a change of the weights.

        False, and nothing is forgotten, if blocks are in use. With `reset_running_requests`, those
        that run or are loaded start over; blocks of loads under way, and those that are being
        sent, are in use nevertheless.
        """
        if reset_running_requests:
            for request in reversed([*self.running, *self._state.loaded()]):
                self._state.start_over(request)
                self._preempted_meanwhile.append(request.request_id)
        if self.kv.pool.num_used:
            return False
        self.kv.pool.forget_all()
        return True

    # ------------------------------------------------------------------ looking in from outside

    @property
    def requests(self) -> Mapping[str, Request]:
        """All that are known; ended ones too, while their blocks are held."""
        return self._state.requests

    @property
    def running(self) -> Sequence[Request]:
        return self._state.running

    @property
    def waiting(self) -> RequestQueue:
        return self._state.waiting

    @property
    def skipped_waiting(self) -> SkippedQueue:
        return self._state.skipped_waiting

    @property
    def kv(self) -> KVCacheManager:
        return self._state.kv

    @property
    def stats(self) -> SchedulerStats:
        return self._state.stats

    def has_requests(self) -> bool:
        return bool(self.requests)

    def block_counts(self) -> BlockCounts:
        """Where the blocks are. Those of an aborted load are in quarantine until it has ended."""
        pool, quarantined = self.kv.pool, self._state.num_quarantined()
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
        state = self._state
        self.kv.pool.check(request.block_ids for request in self.requests.values())
        assert self.block_counts().balanced
        queued = list(state.queued())
        assert len(set(queued)) == len(queued), "a request is queued twice"
        live = {r for r in self.requests.values() if not r.status.finished}
        assert set(queued) == live, "a request is lost or in no queue"
        assert len(self.running) <= self.config.max_num_seqs
        holding = [
            r for r in self.skipped_waiting if r.block_ids and r.request_id not in state.parked
        ]
        assert state.loaded() == holding, "a loaded request is forgotten"
        assert all(state.is_held(r.request_id) for r in self.requests.values() if r not in live)
