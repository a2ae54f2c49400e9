"""What is recorded of a scheduler's decisions and of its state, and compared in a replay.

    expect    a step as it was decided, and the state right after that
    after     the state when what a step computed was processed

The recorder and the replay call the same functions at the same moments. The fields are described in
`scheduler.trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.output import RequestUpdate, SchedulerOutput
from scheduler.queue import Wait
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

Values = dict[str, Any]

# What a field that is not in a recording stands for. All other fields are always there.
EXPECT_DEFAULTS: Values = {
    "scheduled_spec_tokens": {},
    "block_ids": {},
    "appended_block_ids": {},
    "finished_req_ids": [],
    "free_delayed": [],
    "num_computed_tokens_before": {},
}
AFTER_DEFAULTS: Values = {"stop_reason": {}, "emitted": {}, "free_delayed": []}

_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ERROR: "error",
}


def loading(scheduler: Scheduler) -> set[str]:
    """Requests whose load is under way; to be noted before a step, and before its results."""
    return set(_ids(scheduler.skipped_waiting.waiting_for(Wait.REMOTE_KVS)))


def held(scheduler: Scheduler, request_ids: Iterable[str]) -> list[str]:
    """Those of these ended requests whose blocks are kept."""
    return [i for i in request_ids if i in scheduler.requests]


def decision(
    scheduler: Scheduler,
    output: SchedulerOutput,
    *,
    loading_before: set[str],
    aborted: Iterable[str],
) -> Values:
    """`expect`. `aborted` went before the step was decided."""
    requests = scheduler.requests
    new, resumed = output.scheduled_new_reqs, output.scheduled_resumed_reqs
    cached = output.scheduled_cached_reqs
    before = {r.request_id: r.num_computed_tokens for r in (*new, *resumed)}
    before |= {r.request_id: r.num_computed_tokens for r in cached}
    newly_loading = sorted(loading(scheduler) - loading_before)
    return {
        "num_scheduled_tokens": [list(x) for x in output.num_scheduled_tokens.items()],
        "new": [r.request_id for r in new],
        "resumed": [r.request_id for r in resumed],
        "preempted": list(output.preempted_req_ids),
        "scheduled_spec_tokens": {i: list(t) for i, t in output.scheduled_spec_tokens.items()},
        "num_computed_tokens_before": before,
        "block_ids": {r.request_id: list(r.block_ids) for r in [*new, *resumed]}
        | {i: list(requests[i].block_ids) for i in newly_loading},
        "appended_block_ids": {
            r.request_id: list(r.new_block_ids) for r in cached if r.new_block_ids
        },
        "num_blocks": {i: len(r.block_ids) for i, r in requests.items() if r.block_ids},
        "running": _ids(scheduler.running),
        "waiting": _ids(scheduler.waiting),
        "skipped_waiting": _ids(scheduler.skipped_waiting),
        "free_blocks": scheduler.kv.pool.num_unused,
        "status": {i: r.status.name for i, r in requests.items()},
        "finished_req_ids": list(output.finished_req_ids),
        "free_delayed": held(scheduler, aborted),
    }


def outcome(
    scheduler: Scheduler,
    sampled: Mapping[str, Sequence[int]],
    updates: Sequence[RequestUpdate],
    *,
    loading_before: set[str],
    held_before: Iterable[str],
) -> Values:
    """`after`. `held_before` were aborted while the step ran, and keep their blocks."""
    ended = [u.request for u in updates if u.finished]
    waiting = [*scheduler.waiting, *scheduler.skipped_waiting]
    known = [*scheduler.running, *(r for r in waiting if r.num_computed_tokens)]
    return {
        "finished": {r.request_id: _REASONS[r.status] for r in ended},
        "stop_reason": {
            r.request_id: r.stop_token_id for r in ended if r.stop_token_id is not None
        },
        "emitted": _emitted(sampled, updates),
        "num_tokens": {r.request_id: r.num_tokens for r in known},
        "num_computed_tokens": {r.request_id: r.num_computed_tokens for r in known},
        "free_blocks": scheduler.kv.pool.num_unused,
        # Those whose load ended while it was processed had to wait for that, too.
        "free_delayed": [
            *held_before,
            *(i for i in _ids(ended) if i in loading_before or i in scheduler.requests),
        ],
    }


def _emitted(sampled: Mapping[str, Sequence[int]], updates: Sequence[RequestUpdate]) -> Values:
    """Tokens that were kept, where they are not those that were sampled."""
    kept: dict[str, list[int]] = {}
    for update in updates:
        kept.setdefault(update.request.request_id, []).extend(update.new_token_ids)
    return {i: kept.get(i, []) for i, t in sampled.items() if kept.get(i, []) != list(t)}


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]
