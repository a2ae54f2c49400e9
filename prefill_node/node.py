"""Computes prompts, samples the first token, and pushes the KV to a decode node.

    job ─► scheduler ─► chunks ─► first token to the caller at once
              │            └──► finished blocks travel while the next chunk runs
              └── PrefillStarted to D ……… Destination ……… Commit

The request ends here with its first token: that is sampled, or, if the client has some already, the
last of those, which D is to go on from. Its blocks stay pinned until D has them, unless another
request lacks blocks: then the youngest pin that D has not reserved for is given up, and computed
again (mostly from cache) once D has room. So nobody here waits for D, and no circle can close.
"""

from __future__ import annotations

import msgspec

from engine import ActiveJob, HandoffRole
from kv_transfer import EventKind, HandoffEvent, PeerUnreachable, Reason
from protocol import FinishReason, PrefillJob
from scheduler import Request, RequestUpdate


class PrefillRole(HandoffRole):
    """What a prefill node does on its engine's thread."""

    def accept(self, job: PrefillJob) -> None:
        active = ActiveJob(job, handed_off=job.decode_endpoint is not None)
        self._host.add_job(active)
        if job.decode_endpoint is not None:
            try:
                self._connector.add_source(
                    job.ticket,
                    job.decode_endpoint,
                    job.request.arrival_time,
                    known_tokens=job.emitted[-1:],
                )
            except PeerUnreachable as error:
                self._host.fail_job(active, error, retryable=True)
                return
        self._host.add_request(self._make_request(active))

    @staticmethod
    def _make_request(active: ActiveJob) -> Request:
        """The request as this node sees it: it ends with the next token."""
        sampling, last = active.job.request.sampling, len(active.forced) + 1
        return active.make_request(
            msgspec.structs.replace(
                sampling, max_tokens=last, min_tokens=min(sampling.min_tokens, last)
            )
        )

    # ------------------------------------------------------------------ RolePolicy

    def _on_event(self, active: ActiveJob, event: HandoffEvent) -> None:
        timeline = active.timeline
        match event.kind:
            case EventKind.PUSHED:
                timeline.first_block_pushed = timeline.first_block_pushed or self._host.now
                timeline.last_block_pushed = self._host.now
            case EventKind.RECOMPUTE:
                self._host.add_request(self._make_request(active))
            case EventKind.SENT:
                self._on_sent(active, event.reason, event.detail)

    def _on_sent(self, active: ActiveJob, reason: Reason | None, detail: str) -> None:
        """The hand-off is over: D has the word now, or somebody has to do it again."""
        if reason is None or self._is_left_to_peer(reason):
            self._host.emit(active, active.delta(handed_off=True))
            self._host.drop_job(active)
        else:
            self._fail(active, reason, detail)

    def _is_left_to_peer(self, reason: Reason) -> bool:
        """Whether D, which was told, computes the request itself."""
        told = reason not in (Reason.PEER_LOST, Reason.PEER_REFUSED, Reason.DRAINING)
        return told and self._on_transfer_failure == "recompute"

    @staticmethod
    def _has_told(active: ActiveJob) -> bool:
        """Whether the caller has the token that this node samples: told by us, or known before."""
        return active.position > len(active.forced)

    def on_started(self, job: ActiveJob) -> None:
        job.timeline.prefill_started = job.timeline.prefill_started or self._host.now

    def on_update(self, job: ActiveJob, update: RequestUpdate) -> None:
        if self._has_told(job):
            job.timeline.prefill_finished = job.timeline.prefill_finished or self._host.now
            return  # computed for its KV; the token is known
        job.timeline.prefill_finished = self._host.now
        reason = update.request.finish_reason
        goes_on = reason is FinishReason.LENGTH and job.handed_off
        self._host.emit(
            job,
            job.delta(
                update.new_token_ids,
                update.logprobs,
                finish_reason=None if goes_on else reason,
                stop_token_id=update.request.stop_token_id,
            ),
        )
        if not goes_on:
            self._host.end_job(job)

    def on_cancel(self, job: ActiveJob) -> None:
        self._connector.abandon_source(job.key)

    def ends_soon(self, job: ActiveJob) -> bool:
        computed = job.timeline.prefill_finished is not None
        return computed and self._connector.moves(job.key)

    def num_intake(self) -> int:
        return 0
