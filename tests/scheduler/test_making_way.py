"""`waiting_preempts_running`: who makes way for a more urgent request, and when nobody does."""

from __future__ import annotations

import pytest

from scheduler import Scheduler, Wait
from tests.scheduler.small_scheduler import (
    RemotePrefill,
    add,
    make,
    request,
    run,
    run_out,
    running,
)


def urgent_last(
    num_blocks: int = 20, connector: RemotePrefill | None = None, **config: object
) -> Scheduler:
    settings = {"policy": "priority", "waiting_preempts_running": True} | config
    return make(num_blocks, connector, **settings)  # type: ignore[arg-type]


def test_the_least_urgent_one_gives_up_its_seat() -> None:
    scheduler = urgent_last(max_num_seqs=2)
    add(scheduler, request("mild", 4, priority=1), request("idle", 4, priority=2))
    run(scheduler)
    add(scheduler, request("urgent", 4, priority=0))
    step, _ = run(scheduler)
    assert step.preempted_req_ids == ["idle"]
    assert step.num_scheduled_tokens == {"mild": 1, "urgent": 4}
    assert running(scheduler) == ["mild", "urgent"]
    assert [r.request_id for r in scheduler.waiting] == ["idle"]
    run_out(scheduler)


def test_without_the_setting_nobody_does() -> None:
    scheduler = urgent_last(max_num_seqs=1, waiting_preempts_running=False)
    add(scheduler, request("idle", 4, priority=2))
    run(scheduler)
    add(scheduler, request("urgent", 4, priority=0))
    step, _ = run(scheduler)
    assert step.num_scheduled_tokens == {"idle": 1}
    assert step.admission_ended_by is Wait.SEAT


def test_as_many_as_needed_give_up_their_blocks() -> None:
    scheduler = urgent_last(num_blocks=8)
    for number, name in enumerate(("a", "b", "c")):
        add(scheduler, request(name, 5, priority=2, arrival_time=float(number)))
    run(scheduler)
    add(scheduler, request("urgent", 16, priority=0))
    step, _ = run(scheduler)
    assert step.preempted_req_ids == ["c"]  # two blocks were free, and it had two
    assert step.num_scheduled_tokens == {"a": 1, "b": 1, "urgent": 14}
    add(scheduler, request("more urgent", 16, priority=-1))
    step, _ = run(scheduler)
    assert step.preempted_req_ids == ["b", "a"]
    run_out(scheduler)


def test_nobody_does_if_that_would_not_suffice() -> None:
    scheduler = urgent_last(num_blocks=8)
    add(scheduler, request("equal", 12, priority=0), request("idle", 3, priority=2))
    run(scheduler)
    add(scheduler, request("urgent", 20, priority=0, arrival_time=1.0))
    step, _ = run(scheduler)  # it needs 5 blocks, and would get 4
    assert step.preempted_req_ids == []
    assert step.admission_ended_by is Wait.BLOCKS
    assert set(step.num_scheduled_tokens) == {"equal", "idle"}


def test_nobody_does_for_an_equal() -> None:
    scheduler = urgent_last(max_num_seqs=1)
    add(scheduler, request("first", 4, priority=1, arrival_time=1.0))
    run(scheduler)
    add(scheduler, request("earlier", 4, priority=1, arrival_time=0.0))
    step, _ = run(scheduler)
    assert step.num_scheduled_tokens == {"first": 1}


def test_a_hit_on_tokens_of_this_step_keeps_their_request_running() -> None:
    scheduler = urgent_last(max_num_seqs=2, long_prefill_token_threshold=8)
    add(scheduler, request("idle", 20, prompt_of="p", priority=2))
    run(scheduler)
    add(scheduler, request("hits", 17, prompt_of="p", priority=0))
    add(scheduler, request("urgent", 4, priority=1))
    step, _ = run(scheduler)  # 8 tokens of "idle" were computed, 8 more are now
    assert step.scheduled_new_reqs[0].num_computed_tokens == 16
    assert step.num_scheduled_tokens == {"idle": 8, "hits": 1}
    assert step.preempted_req_ids == []
    assert step.admission_ended_by is Wait.SEAT
    step, _ = run(scheduler)
    assert step.preempted_req_ids == ["idle"]
    run_out(scheduler)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_loras": 1}, 6),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, 64),
        ({"max_num_partial_prefills": 1, "long_prefill_token_threshold": 4}, 6),
        ({"max_parked_blocks": 2}, 8),
        ({}, 7),  # the connector does not know yet
    ],
)
def test_nobody_gives_up_a_seat_to_one_that_lacks_something_else(
    settings: dict[str, object], length: int
) -> None:
    connector = RemotePrefill(unknown={"urgent"} if length == 7 else set())
    scheduler = urgent_last(20, connector, max_num_seqs=2, **settings)
    if length == 8:
        connector.remote |= {"loading", "urgent"}
        add(scheduler, request("loading", 8))
    many = "max_num_partial_prefills" in settings
    add(scheduler, request("first", 40 if many else 1, lora_name="x"))
    add(scheduler, request("idle", 1, priority=2))
    run(scheduler)
    run(scheduler)
    assert running(scheduler) == ["first", "idle"]
    add(scheduler, request("urgent", length, priority=1, lora_name="y"))
    for _ in range(3):
        run(scheduler)
        assert scheduler.stats.num_preemptions == 0
        assert running(scheduler) == ["first", "idle"]
