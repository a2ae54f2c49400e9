"""A step is planned while another runs: what may befall a request in between."""

from __future__ import annotations

import pytest

from scheduler import PauseState, Request, RequestStatus, Scheduler, Wait
from tests.scheduler.small_scheduler import (
    RemotePrefill,
    abort,
    add,
    finish,
    make,
    request,
    run,
    run_out,
    running,
)


def two_in_flight(scheduler: Scheduler, *requests: Request) -> tuple:
    add(scheduler, *requests)
    return scheduler.schedule(), scheduler.schedule()


class TestPlaceholders:
    def test_a_token_is_computed_before_anybody_knows_it(self) -> None:
        scheduler = make()
        first, second = two_in_flight(scheduler, request("a", 6, 3))
        assert second.num_scheduled_tokens == {"a": 1}
        assert second.scheduled_cached_reqs[0].num_computed_tokens == 6
        finish(scheduler, first, {"a": [7]})
        third = scheduler.schedule()
        finish(scheduler, second, {"a": [8]})
        assert third.num_scheduled_tokens == {"a": 1}
        assert scheduler.schedule().num_scheduled_tokens == {}  # three tokens are under way
        updates = finish(scheduler, third, {"a": [9]})
        assert updates[0].finished
        assert updates[0].request.output_token_ids == [7, 8, 9]

    def test_no_more_than_two(self) -> None:
        scheduler = make()
        two_in_flight(scheduler)
        with pytest.raises(AssertionError, match="missing"):
            scheduler.schedule()

    def test_in_the_order_in_which_they_were_planned(self) -> None:
        scheduler = make()
        _, second = two_in_flight(scheduler, request("a", 6))
        with pytest.raises(AssertionError, match="order"):
            finish(scheduler, second)

    def test_min_tokens_go_before_max_tokens(self) -> None:
        scheduler = make()
        first, second = two_in_flight(scheduler, request("a", 4, 1, min_tokens=2))
        assert second.num_scheduled_tokens == {"a": 1}
        assert not finish(scheduler, first, {"a": [3]})[0].finished
        assert finish(scheduler, second, {"a": [9]})[0].finished


class TestEndings:
    def test_what_is_computed_after_the_end_is_dropped(self) -> None:
        scheduler = make()
        first, second = two_in_flight(scheduler, request("a", 6))
        assert finish(scheduler, first, {"a": [3]})[0].finished
        third = scheduler.schedule()
        assert third.finished_req_ids == ["a"]
        assert finish(scheduler, second, {"a": [9]}) == []
        assert finish(scheduler, third) == []
        assert not scheduler.has_requests()

    def test_an_aborted_one_gets_no_more_tokens(self) -> None:
        scheduler = make()
        first, second = two_in_flight(scheduler, request("a", 6), request("b", 4))
        abort(scheduler, "a", "nobody")
        updates = finish(scheduler, first, {"a": [7], "b": [7]})
        assert [u.request.request_id for u in updates] == ["b"]
        finish(scheduler, second, {"a": [7], "b": [7]})
        step, _ = run(scheduler)
        assert step.finished_req_ids == ["a"]
        assert set(step.num_scheduled_tokens) == {"b"}

    def test_the_next_request_of_that_name_gets_none_of_its_tokens(self) -> None:
        scheduler = make()
        first, second = two_in_flight(scheduler, request("a", 6))
        abort(scheduler, "a")
        add(scheduler, request("a", 9))
        assert finish(scheduler, first, {"a": [7]}) == []
        third = scheduler.schedule()
        assert third.finished_req_ids == ["a"]
        assert third.scheduled_new_reqs[0].num_computed_tokens == 4  # of the one before
        assert finish(scheduler, second, {"a": [8]}) == []
        updates = finish(scheduler, third, {"a": [9]})
        assert updates[0].request.output_token_ids == [9]

    def test_a_preempted_one_gets_its_token_and_may_end_with_it(self) -> None:
        scheduler = make(4, max_num_seqs=2)
        add(scheduler, request("a", 8, 12), request("b", 7, 12))
        first = scheduler.schedule()
        second = scheduler.schedule()  # a takes the place of b
        assert second.preempted_req_ids == ["b"]
        assert scheduler.requests["b"].status is RequestStatus.PREEMPTED
        updates = finish(scheduler, first, {"a": [7], "b": [3]})
        assert [(u.request.request_id, u.finished) for u in updates] == [("a", False), ("b", True)]
        assert "b" not in scheduler.requests
        third = scheduler.schedule()
        assert third.finished_req_ids == ["b"]
        finish(scheduler, second, {"a": [7]})
        finish(scheduler, third, {"a": [7]})

    def test_a_preempted_one_does_not_start_before_its_token_is_known(self) -> None:
        scheduler = make(20)
        first, second = two_in_flight(scheduler, request("a", 8))
        scheduler.reset_prefix_cache(reset_running_requests=True)
        finish(scheduler, first, {"a": [7]})
        third = scheduler.schedule()
        assert (third.num_scheduled_tokens, third.preempted_req_ids) == ({}, ["a"])
        assert third.admission_ended_by is Wait.PREEMPTION
        finish(scheduler, second, {"a": [8]})
        fourth = scheduler.schedule()
        assert list(fourth.scheduled_resumed_reqs[0].token_ids[-2:]) == [7, 8]
        assert fourth.num_scheduled_tokens == {"a": 10}


class TestReset:
    def test_nothing_is_forgotten_while_blocks_are_in_use(self) -> None:
        scheduler = make()
        add(scheduler, request("a", 9))
        run(scheduler)
        assert not scheduler.reset_prefix_cache()
        assert len(scheduler.kv.pool.cached_chain()) == 2
        abort(scheduler, "a")
        assert scheduler.reset_prefix_cache()
        assert scheduler.kv.pool.cached_chain() == []

    def test_those_that_run_start_over_in_their_order(self) -> None:
        scheduler = make(20, RemotePrefill(remote={"loaded"}), max_num_seqs=2)
        add(scheduler, request("loaded", 8))
        run(scheduler)
        add(scheduler, request("a", 5), request("b", 6), request("c", 4))
        run(scheduler)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        run(scheduler, recving={"loaded": (9,)})
        scheduler.set_pause_state(PauseState.UNPAUSED)
        assert running(scheduler) == ["a", "b"]
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        assert [r.request_id for r in scheduler.waiting] == ["a", "b", "loaded", "c"]
        step, _ = run(scheduler)
        assert step.preempted_req_ids == ["loaded", "b", "a"]
        assert [r.request_id for r in step.scheduled_resumed_reqs] == ["a", "b"]
        assert all(r.num_computed_tokens == 0 for r in step.scheduled_resumed_reqs)
        run_out(scheduler)

    def test_a_load_under_way_keeps_its_blocks(self) -> None:
        scheduler = make(20, RemotePrefill(remote={"a"}))
        add(scheduler, request("a", 8))
        run(scheduler)
        assert not scheduler.reset_prefix_cache(reset_running_requests=True)
        assert scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        run(scheduler, recving={"a": (9,)})
        run_out(scheduler)

    def test_a_loaded_one_that_waits_for_an_adapter_starts_over_too(self) -> None:
        scheduler = make(20, RemotePrefill(remote={"a"}), max_loras=1)
        add(scheduler, request("a", 8, lora_name="x"), request("b", 4, lora_name="y"))
        run(scheduler)
        run(scheduler, recving={"a": (9,)})
        run(scheduler)
        assert scheduler.skipped_waiting.waits_for(scheduler.requests["a"]) is Wait.LORA
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        run_out(scheduler)


class TestPause:
    def test_nobody_new_starts(self) -> None:
        scheduler = make(20)
        add(scheduler, request("a", 5))
        run(scheduler)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        add(scheduler, request("b", 5))
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 1}
        assert step.admission_ended_by is Wait.PAUSE
        scheduler.set_pause_state(PauseState.UNPAUSED)
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 1, "b": 5}

    def test_nothing_is_computed(self) -> None:
        scheduler = make(20)
        first, _ = two_in_flight(scheduler, request("a", 5))
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        updates = finish(scheduler, first, {"a": [7]})
        assert len(updates) == 1  # what was planned before counts
        step = scheduler.schedule()
        assert step.num_scheduled_tokens == {}
        assert step.admission_ended_by is None
        assert scheduler.pause_state is PauseState.PAUSED_ALL
        assert running(scheduler) == ["a"]
        abort(scheduler, "a")
        assert not scheduler.has_requests()

    def test_loads_end_meanwhile_and_none_begins(self) -> None:
        connector = RemotePrefill(remote={"a", "b"})
        scheduler = make(20, connector)
        add(scheduler, request("a", 5))
        run(scheduler)
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        add(scheduler, request("b", 5))
        run(scheduler, recving={"a": (9,)})
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {}
        assert list(connector.reserved) == ["a"]
        scheduler.set_pause_state(PauseState.UNPAUSED)
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 1}
        assert list(connector.reserved) == ["a", "b"]
