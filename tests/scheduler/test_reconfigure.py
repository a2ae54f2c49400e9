"""Another configuration for a scheduler that has nothing to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler import Scheduler
from tests.scheduler.small_scheduler import (
    RemotePrefill,
    abort,
    add,
    make,
    request,
    run,
    run_out,
    running,
)


def changed(scheduler: Scheduler, **config: object) -> None:
    scheduler.reconfigure(replace(scheduler.config, **config))  # type: ignore[arg-type]


def test_the_new_limits_hold_from_the_next_step_on() -> None:
    scheduler = make(max_num_seqs=1, max_num_batched_tokens=16)
    add(scheduler, request("a", 6), request("b", 6))
    run(scheduler)
    assert running(scheduler) == ["a"]
    run_out(scheduler)
    changed(scheduler, max_num_seqs=2, max_num_batched_tokens=8)
    add(scheduler, request("c", 6), request("d", 6))
    step, _ = run(scheduler)
    assert step.num_scheduled_tokens == {"c": 6, "d": 2}
    run_out(scheduler)


@pytest.mark.parametrize(("policy", "first"), [("fcfs", "late"), ("priority", "urgent")])
def test_so_does_the_order(policy: str, first: str) -> None:
    scheduler = make(max_num_seqs=1, policy="fcfs" if policy == "priority" else "priority")
    add(scheduler, request("before", 6))
    run_out(scheduler)
    changed(scheduler, policy=policy)
    add(scheduler, request("late", 6, priority=1), request("urgent", 6, priority=0))
    run(scheduler)
    assert running(scheduler) == [first]
    run_out(scheduler)


def test_what_is_cached_can_be_hit() -> None:
    scheduler = make(max_num_seqs=4)
    add(scheduler, request("a", 12))
    run_out(scheduler)
    cached = scheduler.block_counts().cached
    changed(scheduler, max_num_seqs=2, policy="priority")
    assert scheduler.block_counts().cached == cached > 0
    add(scheduler, request("again", 13, prompt_of="a"))
    step, _ = run(scheduler)
    assert step.num_scheduled_tokens == {"again": 1}
    run_out(scheduler)


def test_what_is_held_is_held() -> None:
    """Blocks into which a peer may still write."""
    connector = RemotePrefill(remote={"a"})
    scheduler = make(connector=connector)
    add(scheduler, request("a", 12))
    run(scheduler)
    abort(scheduler, "a")
    changed(scheduler, max_num_seqs=2)
    assert scheduler.block_counts().quarantined == 3
    run(scheduler, recving={"a": ()})
    assert scheduler.block_counts().quarantined == 0
    assert not scheduler.has_requests()


def test_not_while_somebody_is_queued() -> None:
    scheduler = make()
    add(scheduler, request("a", 6))
    with pytest.raises(AssertionError, match="is queued"):
        changed(scheduler, max_num_seqs=2)


def test_not_for_longer_requests() -> None:
    with pytest.raises(AssertionError, match="longest request"):
        changed(make(), max_model_len=32)
