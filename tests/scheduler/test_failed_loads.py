"""KV that could not be loaded: nobody computes, samples or hits anything that relies on it."""

from __future__ import annotations

import pytest

from scheduler import RequestStatus, Scheduler, SchedulerOutput
from tests.scheduler.small_scheduler import (
    RemotePrefill,
    abort,
    add,
    finish,
    make,
    request,
    run,
    run_out,
)


def table(scheduler: Scheduler, name: str) -> list[int]:
    return list(scheduler.requests[name].block_ids)


def told(step: SchedulerOutput, name: str) -> int:
    """Where a step begins to compute."""
    known = {data.request_id: data.num_computed_tokens for data in step.scheduled_cached_reqs}
    for data in (*step.scheduled_new_reqs, *step.scheduled_resumed_reqs):
        known[data.request_id] = data.num_computed_tokens
    return known[name]


class TestAtOnce:
    """The load is part of the step that admits the request."""

    def test_it_is_computed_instead_and_its_token_is_dropped(self) -> None:
        scheduler = make(20, RemotePrefill(at_once={"a": 8}))
        add(scheduler, request("a", 10))
        step = scheduler.schedule()
        assert step.num_scheduled_tokens == {"a": 2}
        assert finish(scheduler, step, {"a": [7]}, invalid=table(scheduler, "a")[1:2]) == []
        step, updates = run(scheduler)
        assert (told(step, "a"), step.num_scheduled_tokens) == (4, {"a": 6})
        assert updates[0].position == 0

    def test_or_the_request_ends(self) -> None:
        scheduler = make(20, RemotePrefill(at_once={"a": 8}), kv_load_failure_policy="fail")
        add(scheduler, request("a", 10), request("b", 3))
        step = scheduler.schedule()
        updates = finish(scheduler, step, {"a": [7], "b": [7]}, invalid=table(scheduler, "a")[1:2])
        assert [(u.request.request_id, u.finished, list(u.new_token_ids)) for u in updates] == [
            ("b", False, [7]),
            ("a", True, []),
        ]
        assert updates[1].request.status is RequestStatus.FINISHED_ERROR
        assert scheduler.kv.pool.num_used == 1
        assert len(scheduler.kv.pool.cached_chain()) == 1  # of a, the block that did come

    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_two_that_share_the_block(self, policy: str) -> None:
        scheduler = make(20, RemotePrefill(at_once={"a": 8}), kv_load_failure_policy=policy)
        add(scheduler, request("a", 10, prompt_of="p"), request("b", 9, prompt_of="p"))
        step = scheduler.schedule()
        assert told(step, "b") == 8
        updates = finish(scheduler, step, {"a": [7], "b": [7]}, invalid=table(scheduler, "a")[1:2])
        if policy == "fail":
            assert {u.request.request_id for u in updates if u.finished} == {"a", "b"}
            return
        assert updates == []
        step, _ = run(scheduler)
        assert (told(step, "a"), told(step, "b")) == (4, 4)
        run_out(scheduler)

    def test_what_was_planned_meanwhile_is_dropped_too(self) -> None:
        scheduler = make(20, RemotePrefill(at_once={"a": 8}))
        add(scheduler, request("a", 10, prompt_of="p"))
        first = scheduler.schedule()
        add(scheduler, request("b", 9, prompt_of="p"))
        second = scheduler.schedule()
        assert second.num_scheduled_tokens == {"a": 1, "b": 1}
        assert finish(scheduler, first, {"a": [7]}, invalid=table(scheduler, "a")[:1]) == []
        third = scheduler.schedule()
        assert (told(third, "a"), told(third, "b")) == (0, 0)
        assert finish(scheduler, second, {"a": [8], "b": [8]}) == []
        updates = finish(scheduler, third, {"a": [7], "b": [9]})
        outputs = [(u.request.request_id, u.position, list(u.new_token_ids)) for u in updates]
        assert outputs in ([("a", 0, [7]), ("b", 0, [9])], [("a", 0, [7])])
        run_out(scheduler)

    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_what_an_aborted_one_leaves_is_not_hit(self, in_flight: int) -> None:
        """Neither the block that did not come nor what was computed from it."""
        scheduler = make(20, RemotePrefill(at_once={"a": 8}))
        add(scheduler, request("a", 14, prompt_of="p"))
        steps = [scheduler.schedule() for _ in range(in_flight)]
        invalid = table(scheduler, "a")[1:2]
        abort(scheduler, "a")
        finish(scheduler, steps[0], {"a": [7]}, invalid=invalid)
        add(scheduler, request("b", 14, prompt_of="p"), request("c", 14, prompt_of="p"))
        step = scheduler.schedule()
        assert (told(step, "b"), told(step, "c")) == (4, 12)
        assert table(scheduler, "c")[:3] == table(scheduler, "b")[:3]

    def test_the_token_of_one_that_has_to_start_over_is_dropped(self) -> None:
        scheduler = make(20, RemotePrefill(at_once={"a": 8}))
        add(scheduler, request("a", 10))
        step = scheduler.schedule()
        invalid = table(scheduler, "a")[:1]
        scheduler.reset_prefix_cache(reset_running_requests=True)
        assert finish(scheduler, step, {"a": [7]}, invalid=invalid) == []
        step, updates = run(scheduler)
        assert (told(step, "a"), updates[0].position) == (0, 0)

    def test_who_got_the_block_since_is_not_concerned(self) -> None:
        """It would have computed all its tokens, and wait for ever."""
        scheduler = make(2, RemotePrefill(at_once={"a": 3}), caching=False)
        add(scheduler, request("b", 4, 3), request("a", 4))
        first = scheduler.schedule()
        invalid = table(scheduler, "a")[:1]
        abort(scheduler, "a")
        second = scheduler.schedule()
        assert invalid == table(scheduler, "b")[1:]
        updates = finish(scheduler, first, {"b": [7], "a": [8]}, invalid=invalid)
        assert [list(u.new_token_ids) for u in updates] == [[7]]
        updates = finish(scheduler, second, {"b": [7]})
        assert [(u.position, list(u.new_token_ids)) for u in updates] == [(1, [7])]
        run_out(scheduler)


class TestWhileItWaits:
    @pytest.mark.parametrize(("index", "num_computed"), [(0, 0), (1, 4)])
    def test_the_rest_is_computed(self, index: int, num_computed: int) -> None:
        scheduler = make(20, RemotePrefill(remote={"a"}))
        add(scheduler, request("a", 10))
        run(scheduler)
        run(scheduler, invalid=table(scheduler, "a")[index : index + 1])
        run(scheduler, recving={"a": ()})
        step, _ = run(scheduler)
        assert (told(step, "a"), step.num_scheduled_tokens) == (
            num_computed,
            {"a": 10 - num_computed},
        )
        run_out(scheduler)

    def test_nothing_that_did_not_come_is_hit(self) -> None:
        scheduler = make(20, RemotePrefill(remote={"a"}))
        add(scheduler, request("a", 12, prompt_of="p"))
        run(scheduler)
        run(scheduler, recving={"a": (9,)}, invalid=table(scheduler, "a")[1:2])
        add(scheduler, request("b", 12, prompt_of="p"))
        step = scheduler.schedule()
        assert told(step, "a") == 4
        assert told(step, "b") == 8  # which a computes in this step
        finish(scheduler, step, {"a": [7], "b": [7]})
        run_out(scheduler)

    def test_or_it_ends_and_keeps_its_blocks_until_nobody_writes_to_them(self) -> None:
        scheduler = make(20, RemotePrefill(remote={"a"}), kv_load_failure_policy="fail")
        add(scheduler, request("a", 10))
        run(scheduler)
        _, updates = run(scheduler, invalid=table(scheduler, "a")[1:2])
        assert [u.request.status for u in updates] == [RequestStatus.FINISHED_ERROR]
        assert scheduler.block_counts().quarantined == 3
        _, updates = run(scheduler, recving={"a": (9,)})
        assert updates == []
        assert not scheduler.has_requests()

    def test_its_last_block_alone(self) -> None:
        """A prompt of one token, of which nothing came."""
        scheduler = make(20, RemotePrefill(remote={"a"}))
        add(scheduler, request("a", 1))
        run(scheduler)
        run(scheduler, recving={"a": ()}, invalid=table(scheduler, "a"))
        step, _ = run(scheduler)
        assert (told(step, "a"), step.num_scheduled_tokens) == (0, {"a": 1})

    def test_a_prompt_of_one_token_is_computed_again_without_a_token(self) -> None:
        scheduler = make(20, RemotePrefill(remote={"a"}))
        add(scheduler, request("a", 1))
        run(scheduler)
        run(scheduler, recving={"a": ()})
        step, updates = run(scheduler)
        assert (told(step, "a"), step.num_scheduled_tokens) == (0, {"a": 1})
        assert updates[0].position == 0

    def test_a_hit_on_a_block_that_another_one_fails_to_load(self) -> None:
        """The load of b is asynchronous, behind a prefix that a loads at once."""
        connector = RemotePrefill(at_once={"a": 8}, remote={"b"})
        scheduler = make(20, connector)
        add(scheduler, request("a", 9, prompt_of="p"), request("b", 16, prompt_of="p"))
        step = scheduler.schedule()
        assert scheduler.requests["b"].num_computed_tokens == 16
        finish(scheduler, step, {"a": [7]}, invalid=table(scheduler, "a")[1:2])
        run(scheduler, recving={"b": ()})
        step, _ = run(scheduler)
        assert told(step, "b") == 4
        run_out(scheduler)

    def test_the_same_if_its_load_ends_first(self) -> None:
        connector = RemotePrefill(at_once={"a": 8}, remote={"b"})
        scheduler = make(20, connector)
        add(scheduler, request("x", 3))
        first = scheduler.schedule()
        add(scheduler, request("a", 9, prompt_of="p"), request("b", 16, prompt_of="p"))
        second = scheduler.schedule()
        finish(scheduler, first, {"x": [7]}, recving={"b": ()})
        invalid = table(scheduler, "b")[1:2]
        finish(scheduler, second, {"x": [7], "a": [7]}, invalid=invalid)
        third = scheduler.schedule()
        assert (told(third, "a"), told(third, "b")) == (4, 4)
        finish(scheduler, third, {"x": [7], "a": [7]})
        run_out(scheduler)

    def test_if_it_was_aborted_meanwhile_nobody_hits_that_block(self) -> None:
        connector = RemotePrefill(at_once={"a": 8}, remote={"b"})
        scheduler = make(20, connector)
        add(scheduler, request("a", 9, prompt_of="p"), request("b", 16, prompt_of="p"))
        step = scheduler.schedule()
        invalid = table(scheduler, "a")[1:2]
        abort(scheduler, "a", "b")  # the blocks of b are kept until its load has ended
        finish(scheduler, step, {"a": [7]}, invalid=invalid)
        run(scheduler, recving={"b": ()})
        add(scheduler, request("c", 9, prompt_of="p"))
        step, _ = run(scheduler)
        assert told(step, "c") == 4

    def test_if_nothing_came_it_may_hit_what_others_have_computed(self) -> None:
        scheduler = make(20, RemotePrefill(remote={"a"}))
        add(scheduler, request("a", 9, prompt_of="p"), request("b", 9, prompt_of="p"))
        run(scheduler)
        run(scheduler, recving={"a": ()}, invalid=table(scheduler, "a")[:1])
        step, _ = run(scheduler)
        assert told(step, "a") == 8


class TestHolds:
    def test_blocks_that_are_loaded_and_sent_are_kept_for_both(self) -> None:
        connector = RemotePrefill(remote={"a"}, pin_all=True)
        scheduler = make(4, connector)
        add(scheduler, request("a", 8))
        run(scheduler)
        abort(scheduler, "a")
        run(scheduler, sending=("a",))
        assert scheduler.block_counts().quarantined == 2
        connector.pinned.clear()
        run(scheduler, recving={"a": ()})
        assert not scheduler.has_requests()

    def test_giving_up_the_pin_is_not_enough_while_a_peer_writes(self) -> None:
        connector = RemotePrefill(remote={"a"}, pin_all=True)
        scheduler = make(4, connector)
        add(scheduler, request("a", 8))
        run(scheduler)
        abort(scheduler, "a")
        connector.pin_all = False
        add(scheduler, request("b", 12))
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {}
        assert scheduler.stats.num_revoked_pins == 1
        assert scheduler.block_counts().quarantined == 2
        run(scheduler, recving={"a": (7,)})
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"b": 12}
        run_out(scheduler)
