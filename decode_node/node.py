"""Receives the KV of prompts, takes requests up after their first token, and decodes them.

    job ─► intake ── PrefillStarted ─► scheduler: blocks reserved, WAITING_FOR_REMOTE_KVS
                                           │ Destination to P … blocks … Commit with token 1
                                           ▼
                                        promoted ─► continuous batching from token 2

If P is lost before the commit the caller hears of it, and the request stays where it is, for a
while: with its place and its blocks, for the P that the caller's next attempt names.

A job without a prefill endpoint skips all that: this node computes the prompt itself. So a node
that never gets any other job is a unified node, the aggregated baseline.
"""

from __future__ import annotations

from decode_node.config import DecodeConfig
from decode_node.intake import Intake
from engine import ActiveJob, EngineHost, HandoffRole
from kv_transfer import EventKind, HandoffConnector, HandoffEvent, PeerUnreachable, Reason
from protocol import DecodeJob
from scheduler import RequestUpdate


class DecodeRole(HandoffRole):
    """What a decode node does on its engine's thread."""

    def __init__(self, host: EngineHost, connector: HandoffConnector, config: DecodeConfig) -> None:
        super().__init__(host, connector)
        self._config = config
        self._intake = Intake(self._admit)

    def accept(self, job: DecodeJob) -> None:
        for older in self._older(job):
            if self._take_over(older, job):
                return
            self._end(older)
        active = ActiveJob(job, handed_off=job.prefill_endpoint is not None)
        self._host.add_job(active)
        if job.prefill_endpoint is None:
            self._admit(active)
            return
        active.position = self._first_position(job)
        try:
            started = self._connector.add_sink(job.ticket, job.prefill_endpoint)
        except PeerUnreachable as error:
            self._host.fail_job(active, error, retryable=True)
            return
        if started or self._config.reserve == "on_arrival":
            self._admit(active)
        else:
            self._intake.add(active)

    @staticmethod
    def _first_position(job: DecodeJob) -> int:
        """Of the tokens that are ours to tell: the very first one is P's."""
        return max(1, len(job.emitted))

    def _older(self, job: DecodeJob) -> list[ActiveJob]:
        """Attempts at the same request before this one."""
        if not job.attempt:
            return []
        request_id, jobs = job.request.request_id, self._host.jobs.values()
        mine = [active for active in jobs if active.job.request.request_id == request_id]
        return [active for active in mine if active.job.attempt < job.attempt]

    def _take_over(self, older: ActiveJob, job: DecodeJob) -> bool:
        """Whether this attempt goes on with what the older one has: it only gets another P."""
        if job.prefill_endpoint is None or older.key in self._intake:
            return False
        if older.forced != job.emitted[:-1]:
            return False  # it has decoded since
        try:
            taken_over = self._connector.retarget_sink(older.key, job.ticket, job.prefill_endpoint)
        except PeerUnreachable as error:
            self._host.pass_on(older, job)
            self._host.tell_failure(older, error, retryable=True)
            return True  # and waits for a third
        if taken_over:
            self._host.pass_on(older, job)
            older.position = self._first_position(job)
        return taken_over

    def _end(self, older: ActiveJob) -> None:
        self._host.drop_job(older)
        self._forget(older)

    def _admit(self, active: ActiveJob) -> None:
        self._host.add_request(active.make_request(active.job.request.sampling))

    # ------------------------------------------------------------------ RolePolicy

    def _on_event(self, active: ActiveJob, event: HandoffEvent) -> None:
        match event.kind:
            case EventKind.STARTED:
                self._intake.start(active.key)
            case EventKind.RESERVED:
                active.timeline.reserved = self._host.now
            case EventKind.COMMITTED:
                active.timeline.committed = self._host.now
            case EventKind.LOST:
                assert event.reason is not None
                self._on_lost(active, event.reason, event.detail)
            case EventKind.LAPSED:
                self._end(active)  # the caller has heard of the loss

    def _on_lost(self, active: ActiveJob, reason: Reason, detail: str) -> None:
        """The KV will not come. Unless the request is over, somebody has to do it again."""
        if reason is Reason.ENDED_BY_FIRST_TOKEN:
            self._end(active)
        elif self._on_transfer_failure == "recompute":
            self._connector.note_outcome("recompute")
            self._recompute(active)
        elif self._on_transfer_failure == "fail" or active.key in self._intake:
            self._fail(active, reason, detail)
            self._forget(active)
        else:
            error, retryable = self._blame(reason, detail)
            self._host.tell_failure(active, error, retryable=retryable)

    def _recompute(self, active: ActiveJob) -> None:
        """Compute the prompt here, into other blocks: P may still write to those that it knew."""
        self._forget(active)
        active.handed_off = False
        active.position = len(active.job.emitted)  # P may have told one more: we know it soon
        self._host.start_over(active, f"{active.key}/recomputed")
        self._admit(active)

    def _forget(self, active: ActiveJob) -> None:
        """The scheduler speaks to the connector of requests that it knows; of others, we do."""
        if self._intake.drop(active.key):
            self._connector.drop_sink(active.key, Reason.CANCELLED)

    def on_started(self, job: ActiveJob) -> None:
        if job.handed_off:
            job.timeline.promoted = job.timeline.promoted or self._host.now
        else:
            job.timeline.prefill_started = job.timeline.prefill_started or self._host.now

    def on_update(self, job: ActiveJob, update: RequestUpdate) -> None:
        if not job.handed_off:
            job.timeline.prefill_finished = job.timeline.prefill_finished or self._host.now
        self._host.emit(
            job,
            job.delta(
                update.new_token_ids,
                update.logprobs,
                finish_reason=update.request.finish_reason,
                stop_token_id=update.request.stop_token_id,
            ),
        )
        if update.finished:
            self._host.end_job(job)

    def on_cancel(self, job: ActiveJob) -> None:
        self._forget(job)

    def num_intake(self) -> int:
        return len(self._intake)
