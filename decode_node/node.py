"""Receives the KV of prompts, takes requests up after their first token, and decodes them.

    job ─► intake ── PrefillStarted ─► scheduler: blocks reserved, WAITING_FOR_REMOTE_KVS
                                           │ Destination to P … blocks … Commit with token 1
                                           ▼
                                        promoted ─► continuous batching from token 2

A job without a prefill endpoint skips all that: this node computes the prompt itself. So a node
that never gets any other job is a unified node, the aggregated baseline.
"""

from __future__ import annotations

from decode_node.config import DecodeConfig
from decode_node.intake import Intake
from engine import ActiveJob, EngineHost, HandoffRole, LocalNode
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
        active = ActiveJob(job, handed_off=job.prefill_endpoint is not None)
        self._host.add_job(active)
        if job.prefill_endpoint is None:
            self._admit(active)
            return
        active.position += 1  # the first token of this attempt is P's to tell
        try:
            started = self._connector.add_sink(job.ticket, job.prefill_endpoint)
        except PeerUnreachable as error:
            self._host.fail_job(active, error, retryable=True)
            return
        if started or self._config.reserve == "on_arrival":
            self._admit(active)
        else:
            self._intake.add(active)

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

    def _on_lost(self, active: ActiveJob, reason: Reason, detail: str) -> None:
        """The KV will not come. Unless the request is over, somebody has to do it again."""
        if reason is Reason.ENDED_BY_FIRST_TOKEN:
            self._host.drop_job(active)
            self._forget(active)
        elif self._on_transfer_failure == "recompute":
            self._connector.note_outcome("recompute")
            self._recompute(active)
        else:
            self._fail(active, reason, detail)
            self._forget(active)

    def _recompute(self, active: ActiveJob) -> None:
        """Compute the prompt here, into other blocks: P may still write to those that it knew."""
        self._forget(active)
        active.handed_off = False
        active.position -= 1  # whether or not P has told the first token, we know it soon
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


class LocalDecodeNode(LocalNode):
    """A decode (or unified) node in this process (`protocol.DecodeNode`)."""

    def __init__(
        self,
        host: EngineHost,
        connector: HandoffConnector,
        config: DecodeConfig | None = None,
    ) -> None:
        self._role = DecodeRole(host, connector, config or DecodeConfig())
        super().__init__(host, self._role)

    async def decode(self, job: DecodeJob) -> None:
        """Raises NodeLost, Overloaded or PromptTooLong, as `EngineHost.submit` does."""
        self.host.submit(job, self._role.accept)
