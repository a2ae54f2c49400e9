"""Runs an engine in a thread of its own and serves callers in their event loops.

    callers (any thread) ── post ──► commands ─┐
    transport (any thread) ── wake ────────────┤
                                               ▼  the engine's thread
                       ┌─► commands → role.act → engine.step → role.on_update ─┐
                       └───── sleep, if nothing progressed ◄── deltas, status ─┘

All state of scheduler, connector and jobs is touched by that thread only. What a role does beyond
this (hand-off, intake) is in its `RolePolicy`, which can be another one once the node has drained.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec

from engine.active_job import ActiveJob
from engine.callers import Callers
from engine.drain import HANDOFF_GRACE_S, Drain
from engine.loop import Engine, StepResult
from engine.outputs import OutputStream
from engine.publisher import Listener, Publisher
from engine.questions import Questions, call_soon
from engine.rate import PrefillRate
from engine.role_change import RoleChange
from engine.role_policy import RolePolicy, TakesJobs
from protocol import (
    CacheSnapshot,
    Delta,
    Failure,
    Job,
    KvrelayError,
    NodeDraining,
    NodeInfo,
    NodeLost,
    NodeStatus,
    OutputBatch,
    Overloaded,
    PauseMode,
    WrongRole,
)
from scheduler import PauseState, Request, RequestStatus, SchedulerOutput

logger = logging.getLogger(__name__)

JobT = TypeVar("JobT", bound=Job)
AnswerT = TypeVar("AnswerT")

HEARTBEAT_S = 1.0  # an idle node tells that often that it lives
STOP_TIMEOUT_S = 30.0
_MAX_JOBS = 4096

_PAUSE_STATES = {
    None: PauseState.UNPAUSED,
    PauseMode.WAIT: PauseState.PAUSED_NEW,
    PauseMode.KEEP: PauseState.PAUSED_ALL,
}
_PAUSE_MODES = {state: mode for mode, state in _PAUSE_STATES.items()}


class EngineHost:
    """One node's engine, its jobs and its callers."""

    def __init__(
        self,
        info: NodeInfo,
        engine: Engine,
        listener: Listener | None = None,
        *,
        clock: Callable[[], float] = time.time,
        max_jobs: int = _MAX_JOBS,
        max_quarantine: int | None = None,
    ) -> None:
        """`max_quarantine`: with more blocks in quarantine no job is taken; None: no limit."""
        self.info = info
        self.engine = engine
        self.jobs: dict[str, ActiveJob] = {}
        self._role: RolePolicy
        self._publisher = Publisher(engine.scheduler, listener)
        self._clock = clock
        self._max_jobs = max_jobs
        self._max_quarantine = max_quarantine
        self._commands: deque[Callable[[], None]] = deque()
        self._pending: dict[str, int] = {}  # jobs taken and not yet accepted, with their tokens
        self._activity = engine.activity
        self._callers = Callers(info.node_id)
        self._questions = Questions(
            info.node_id, self.post, self._check_runs, timeout_s=STOP_TIMEOUT_S
        )
        self._rate = PrefillRate()
        self._healthy = True
        self._stopping = False
        self._drain = Drain()
        self._thread = threading.Thread(target=self._run, name=f"engine-{info.node_id}")

    # ------------------------------------------------------------------ from any thread

    def start(self, role: RolePolicy) -> None:
        self._role = role
        self._publish()  # so that whoever looks finds a status from the start
        self._thread.start()

    def ask_stop(self) -> None:
        """End the thread after the step that runs now, if any."""
        self._stopping = True
        self._activity.set()

    def stop(self) -> None:
        """End the thread; requests under way are lost, their callers' streams end.

        A node that was never started lets go of what it holds, too.
        """
        self.ask_stop()
        if self._thread.ident is None:
            self._close_engine()
            return
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("%s did not stop within %.0f s", self.info.node_id, STOP_TIMEOUT_S)

    def wake(self) -> None:
        """Something happened that the engine's thread should look at."""
        self._activity.set()

    def post(self, command: Callable[[], None]) -> None:
        """Run this on the engine's thread, in order, between two steps."""
        self._commands.append(command)
        self._activity.set()

    @property
    def role(self) -> RolePolicy:
        """The role of the node now."""
        return self._role

    def submit(self, job: JobT, role: TakesJobs[JobT], *, min_tokens: int | None = None) -> None:
        """Take the job, and have the role accept it on the engine's thread between two steps.

        If the node has drained, or has another role, by then, the job fails as it would here.
        `min_tokens`: of its output that this node has to make, if not all.

        Raises:
            NodeLost: the node does not run any more.
            NodeDraining: it drains.
            Overloaded: too many jobs are here already, or too many blocks are in quarantine.
            PromptTooLong: it could never be computed here.
            InvalidRequest: nor could as many output tokens as it must have.
        """
        self._check_runs()
        if not self._drain.taking:
            raise self._draining_error()
        if len(self.jobs) + len(self._pending) >= self._max_jobs:
            raise Overloaded(
                f"node {self.info.node_id} has {self._max_jobs} requests already", retry_after_s=1.0
            )
        self._check_quarantine()
        num_prompt, num_emitted = len(job.request.prompt_token_ids), len(job.emitted)
        if min_tokens is None:
            min_tokens = job.request.sampling.min_tokens
        self.engine.scheduler.check_fits(num_prompt, num_emitted, min_tokens)
        self._pending[str(job.ticket)] = num_prompt + num_emitted
        self.post(lambda: self._accept(job, role))

    def _draining_error(self) -> NodeDraining:
        return NodeDraining(f"node {self.info.node_id} is draining")

    def _check_runs(self) -> None:
        if not self._healthy or self._stopping:
            raise NodeLost(f"node {self.info.node_id} is down")

    def _check_quarantine(self) -> None:
        if not self._status.admitting:
            raise Overloaded(
                f"node {self.info.node_id} has {self._status.blocks.quarantined} KV blocks in "
                f"quarantine, more than max_quarantine ({self._max_quarantine}): a peer that might "
                "still write to them does not answer",
                retry_after_s=1.0,
            )

    def status(self) -> NodeStatus:
        """As of the last step, and without what only people look at."""
        return self._status

    def full_status(self) -> NodeStatus:
        """With each of the transfers that are under way."""
        status, role = self._status, self._role
        if not (status.healthy and status.transfers.active):
            return status
        transfers = msgspec.structs.replace(status.transfers, live=role.live())
        return msgspec.structs.replace(status, transfers=transfers)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new jobs and return when those under way have ended, or the node has.

        Those that have not after `timeout_s` are given back to their callers. Hand-offs are waited
        for, too: KV that a peer still receives, and blocks to which a peer might still write. With
        a deadline that is not for long; what is left of them then does no harm but to this node's
        blocks.
        """
        self._drain.begin(None if timeout_s is None else time.monotonic() + timeout_s)
        paused = self._status.paused
        if paused is not None:
            logger.warning("%s drains, but is paused: %s", self.info.node_id, paused)
        drained = asyncio.Event()
        release = partial(call_soon, asyncio.get_running_loop(), drained.set)
        self._drain.wait(release)
        self.wake()
        try:
            if self._healthy:  # else its thread may have looked for the last time
                await drained.wait()  # as long as the jobs take, or the caller has patience
        finally:
            self._drain.forget(release)

    async def undrain(self) -> None:
        """Take jobs again, at once. Drains that are waited for have ended by that.

        Raises NodeLost: the node does not run any more.
        """
        self._drain.end()
        await self._ask(lambda: None)  # so that its status says so

    async def change_role(self, change: RoleChange) -> None:
        """Drain, be what `change` says, and take jobs again.

        A caller that does not wait so long leaves the node in the role that it has.

        Raises:
            NodeLost: the node does not run any more.
            Overloaded: somebody undrained it, or changed its role, meanwhile.
        """
        self._check_runs()
        was_taking = self._drain.taking
        changed = False
        try:
            await self.drain()
            changed = await self._ask(partial(self._become, change))
        finally:
            if was_taking and not changed:
                self._drain.end()
                self.wake()
        if not changed:
            raise Overloaded(
                f"node {self.info.node_id} was undrained, or got another role, before it could "
                f"become a {change.info.role} node",
                retry_after_s=1.0,
            )

    async def snapshot(self) -> CacheSnapshot:
        """What can be hit now, as of a number in the sequence of block events."""
        return await self._ask(self._take_snapshot)

    async def pause(self, mode: PauseMode | None) -> None:
        """From the next step on, until None comes. Jobs may come and go meanwhile."""
        state = _PAUSE_STATES[mode]
        await self._ask(lambda: self.engine.scheduler.set_pause_state(state))

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        """As `Scheduler.reset_prefix_cache`."""
        reset = self.engine.scheduler.reset_prefix_cache
        return await self._ask(partial(reset, reset_running_requests=reset_running_requests))

    async def _ask(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Have this answered by the engine's thread, between two steps.

        What the answer has changed is in the status, and told to the listener, by then.

        Raises:
            NodeLost: the node does not run any more, or stops meanwhile.
            TimeoutError: a step takes too long.
        """

        def answer() -> AnswerT:
            value = question()
            self._publish()
            return value

        return await self._questions.ask(answer)

    def outputs(self, caller: str) -> AsyncIterator[OutputBatch]:
        """The deltas of this caller's jobs from now on. A second stream ends the first."""
        stream = self._callers.open(caller)
        if not self._healthy or self._stopping:
            stream.close()
        return self._read(caller, stream)

    async def _read(self, caller: str, stream: OutputStream) -> AsyncIterator[OutputBatch]:
        try:
            async for batch in stream.read():
                yield batch
        finally:
            stream.close()
            self.post(lambda: self._caller_left(caller, stream))

    # ------------------------------------------------------------------ from the engine's thread

    @property
    def now(self) -> float:
        """Seconds of the wall clock, as timelines have them."""
        return self._clock()

    def _accept(self, job: JobT, role: TakesJobs[JobT]) -> None:
        """As long as nothing has ended the role for which the job was taken."""
        if role is not self._role:
            self._refuse(job, WrongRole(f"node {self.info.node_id} is {self.info.role} by now"))
        elif self._drain.drained:
            self._refuse(job, self._draining_error())
        else:
            role.accept(job)

    def _refuse(self, job: Job, error: KvrelayError) -> None:
        self._pending.pop(str(job.ticket), None)
        active = ActiveJob(job)
        self.emit(active, active.delta(failure=Failure(error.label, str(error), retryable=True)))

    def add_job(self, active: ActiveJob) -> None:
        """The node has the job; the scheduler does not know of it yet."""
        self._pending.pop(active.key, None)
        active.timeline.prefill_queued = self.now
        self.jobs[active.key] = active

    def pass_on(self, active: ActiveJob, job: Job) -> None:
        """What the node has of an older attempt is this attempt's from now on."""
        self._pending.pop(str(job.ticket), None)
        active.job, active.failed = job, False

    def add_request(self, request: Request) -> None:
        """The scheduler may compute the job."""
        self.engine.scheduler.add_request(request)

    def start_over(self, active: ActiveJob, key: str) -> None:
        """The job is another request of the scheduler from now on. Of the old one it knows no more
        than that blocks may have to be kept for a while.
        """
        scheduler = self.engine.scheduler
        scheduler.finish_requests([active.key], RequestStatus.FINISHED_ABORTED)
        del self.jobs[active.key]
        active.key = key
        self.jobs[key] = active

    def emit(self, active: ActiveJob, delta: Delta) -> None:
        """Tell the caller, at the end of this round."""
        self._callers.tell(active.job.caller, delta)

    def end_job(self, active: ActiveJob) -> None:
        """Nothing more will be told of it."""
        self.jobs.pop(active.key, None)

    def fail_job(self, active: ActiveJob, error: KvrelayError, *, retryable: bool) -> None:
        """End the job unhappily, in the scheduler as well."""
        self.engine.scheduler.finish_requests([active.key], RequestStatus.FINISHED_ERROR)
        self.tell_failure(active, error, retryable=retryable)
        self.end_job(active)

    def tell_failure(self, active: ActiveJob, error: KvrelayError, *, retryable: bool) -> None:
        """The attempt has failed, which is told once. What it has here stays, for another one."""
        if not active.failed:
            active.failed = True
            self.emit(active, active.delta(failure=Failure(error.label, str(error), retryable)))

    def drop_job(self, active: ActiveJob) -> None:
        """End the job without another word: whoever has to know does."""
        self.end_job(active)
        self.engine.scheduler.finish_requests([active.key], RequestStatus.FINISHED_ABORTED)

    def cancel(self, request_id: str) -> None:
        """Abort all attempts at a request, without another word to the caller."""
        self._cancel_all([j for j in self.jobs.values() if j.job.request.request_id == request_id])

    def _cancel_all(self, jobs: Iterable[ActiveJob]) -> None:
        for active in list(jobs):
            self.drop_job(active)
            self._role.on_cancel(active)

    def _caller_left(self, caller: str, stream: OutputStream) -> None:
        if self._callers.forget(caller, stream):  # else it came back
            self._cancel_jobs_of(caller)

    def _cancel_jobs_of(self, caller: str) -> None:
        self._cancel_all([j for j in self.jobs.values() if j.job.caller == caller])

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._activity.clear()
                if not self._run_once():
                    self._activity.wait(self._idle_s())
        finally:
            # Also when a step raised: then the exception goes on to the thread's hook, which logs
            # it, and callers learn from the end of their streams that this node is lost.
            self._shut_down()

    def _run_once(self) -> bool:
        """One round; whether the next should follow at once."""
        while self._commands:
            self._commands.popleft()()
        self._role.act()
        result = self._step()
        for update in result.updates:
            active = self.jobs.get(update.request.request_id)
            if active is not None:
                self._role.on_update(active, update)
        self._give_back_overdue()
        for caller in self._callers.deliver():
            self._cancel_jobs_of(caller)
        self._publish()
        self._tell_drained()
        return result.progressed or bool(self._commands) or self._role.must_act()

    def _step(self) -> StepResult:
        result = self.engine.step(self._note_started)
        self._rate.add(result.scheduled.num_prompt_tokens, result.execute_s)
        return result

    def _note_started(self, scheduled: SchedulerOutput) -> None:
        for new in scheduled.scheduled_new_reqs:
            active = self.jobs.get(new.request_id)
            if active is not None:
                request = self.engine.scheduler.requests[new.request_id]
                active.num_cached_tokens = request.num_cached_tokens
                self._role.on_started(active)

    def _publish(self) -> None:
        self._status = self._make_status()
        self._publisher.publish(self.info, self._status)

    def _give_back_overdue(self) -> None:
        """The node was to be drained by now: what is left of its jobs may be done elsewhere."""
        now = time.monotonic()
        if not self._drain.is_overdue(now):
            return
        is_patient = not self._drain.is_overdue(now, HANDOFF_GRACE_S)
        for active in list(self.jobs.values()):
            if not (is_patient and self._role.ends_soon(active)):
                self._give_back(active)

    def _give_back(self, active: ActiveJob) -> None:
        self._role.on_give_back(active)
        self.fail_job(active, self._draining_error(), retryable=True)
        self._role.on_cancel(active)

    def _tell_drained(self) -> None:
        if not self._drain.taking and self._is_empty:
            self._drain.note_empty()

    @property
    def _is_empty(self) -> bool:
        """Whether no job is here, nor on its way in. Hand-offs are waited for, but not for ever."""
        if self.jobs or self._commands or self._pending:
            return False
        overdue = self._drain.is_overdue(time.monotonic(), HANDOFF_GRACE_S)
        return overdue or not self._status.transfers.active

    def _become(self, change: RoleChange) -> bool:
        """Whether nothing has happened that it was not planned for."""
        next_generation = self.info.generation + 1
        if not self._drain.drained or change.info.generation != next_generation:
            return False
        self.engine.scheduler.reconfigure(change.scheduler)
        self._role, self.info = change.policy, change.info
        self._drain.end()
        return True

    def _idle_s(self) -> float:
        now = time.monotonic()
        times = (self._role.next_deadline(), self._drain.next_time(now))
        deadline = min((t for t in times if t is not None), default=now + HEARTBEAT_S)
        return min(HEARTBEAT_S, max(0.0, deadline - now))

    def _shut_down(self) -> None:
        """Callers hear of it first: they need not wait for transfers that are under way."""
        self._healthy = False
        self._status = msgspec.structs.replace(self._status, healthy=False)
        self._callers.close()
        self._drain.release()
        self._questions.give_up()
        self._close_engine()
        self._publisher.say_farewell(self.info, self._status)

    def _close_engine(self) -> None:
        self.engine.close()
        if self.engine.connector is not None:
            self.engine.connector.shutdown()

    def _take_snapshot(self) -> CacheSnapshot:
        self._publish()  # so that the number covers everything that is in the pool
        return self._publisher.snapshot(self.info.node_id)

    def _make_status(self) -> NodeStatus:
        scheduler = self.engine.scheduler
        stats, blocks = scheduler.stats, scheduler.block_counts()
        limit = self._max_quarantine
        return NodeStatus(
            node_id=self.info.node_id,
            role=self.info.role,
            healthy=self._healthy,
            draining=not self._drain.taking,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._pending),
            num_skipped_waiting=len(scheduler.skipped_waiting),
            num_intake=self._role.num_intake(),
            queued_tokens=scheduler.queued_tokens() + sum(list(self._pending.values())),
            prefill_tokens_per_s=self._rate.tokens_per_s,
            blocks=blocks,
            admitting=limit is None or blocks.quarantined <= limit,
            transfers=self._role.transfers(),
            num_preemptions=stats.num_preemptions,
            num_prefix_queries=stats.prefix_queries,
            num_prefix_hits=stats.prefix_hits,
            num_prompt_tokens_computed=stats.prompt_computed,
            num_prompt_tokens_loaded=stats.prompt_loaded,
            num_prompt_tokens_recomputed=stats.prompt_recomputed,
            num_generated_tokens=stats.generated,
            num_steps=stats.num_steps,
            paused=_PAUSE_MODES[scheduler.pause_state],
        )
