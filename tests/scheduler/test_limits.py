"""What a single request may have to wait for, and what is never given to it."""

from __future__ import annotations

import pytest

from protocol import InvalidRequest, PromptTooLong
from scheduler import RequestStatus, SchedulerOutput, Wait
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


def starts(step: SchedulerOutput) -> list[str]:
    return [data.request_id for data in step.scheduled_new_reqs]


class TestPartialPrefills:
    def test_no_more_than_allowed_are_amid_their_prompts(self) -> None:
        scheduler = make(
            30, max_num_partial_prefills=2, long_prefill_token_threshold=4, max_num_seqs=8
        )
        add(scheduler, request("a", 10), request("b", 8), request("c", 8), request("short", 2))
        step, _ = run(scheduler)
        # The short one is not partial: it is computed in one step, ahead of c.
        assert step.num_scheduled_tokens == {"a": 4, "b": 4, "short": 2}
        assert [r.request_id for r in scheduler.skipped_waiting] == ["c"]
        assert scheduler.skipped_waiting.waits_for(scheduler.requests["c"]) is Wait.PARTIAL_PREFILL
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 4, "b": 4, "short": 1, "c": 4}
        run_out(scheduler)

    def test_one_at_a_time_without_a_threshold(self) -> None:
        scheduler = make(30, max_num_partial_prefills=1, max_num_batched_tokens=6)
        add(scheduler, request("a", 5), request("b", 5))
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 5, "b": 1}

    def test_long_ones_have_a_limit_of_their_own(self) -> None:
        scheduler = make(
            30,
            max_num_partial_prefills=3,
            max_long_partial_prefills=1,
            long_prefill_token_threshold=6,
            max_num_batched_tokens=13,
        )
        add(scheduler, request("long", 20), request("other", 20), request("short", 6))
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"long": 6, "short": 6}
        assert scheduler.skipped_waiting.waits_for(scheduler.requests["other"]) is Wait.LONG_PREFILL
        step, _ = run(scheduler)
        assert starts(step) == []
        run(scheduler)  # of "long" 8 tokens are left, still more than the threshold
        step, _ = run(scheduler)  # and now 2
        assert starts(step) == ["other"]

    def test_by_default_there_is_no_limit(self) -> None:
        scheduler = make(30, long_prefill_token_threshold=3, max_num_seqs=5)
        add(scheduler, *(request(name, 10) for name in "abcde"))
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 3, "b": 3, "c": 3, "d": 3, "e": 3}

    def test_those_count_for_which_a_step_has_no_tokens(self) -> None:
        scheduler = make(
            30,
            policy="priority",
            waiting_preempts_running=True,
            max_num_seqs=3,
            max_num_batched_tokens=3,
            max_num_partial_prefills=1,
            spec_method="ngram",
            num_speculative_tokens=1,
            async_scheduling=False,
        )
        add(scheduler, request("a", 1), request("idle", 1, priority=3))
        run(scheduler)
        add(scheduler, request("long", 10, priority=2))
        run(scheduler)
        scheduler.update_draft_token_ids({"idle": [9]})
        add(scheduler, request("urgent", 10, priority=2))
        step = scheduler.schedule()
        assert step.num_scheduled_tokens == {"a": 1, "idle": 2}
        assert step.preempted_req_ids == []
        assert step.admission_ended_by is Wait.SEAT


class TestConnector:
    def test_those_of_whom_it_does_not_know_yet_are_asked_once_in_each_step(self) -> None:
        connector = RemotePrefill(unknown={"a", "b"})
        scheduler = make(20, connector)
        add(scheduler, request("a", 4), request("b", 4), request("c", 4))
        step, _ = run(scheduler)
        assert starts(step) == ["c"]
        for _ in range(2):
            connector.asked.clear()
            run(scheduler)
            assert connector.asked == ["a", "b"]
        connector.unknown.remove("b")
        step, _ = run(scheduler)
        assert starts(step) == ["b"]


class TestNeverFits:
    def test_a_prompt_as_long_as_the_pool_is_computed_and_ends(self) -> None:
        scheduler = make(num_blocks=4)
        add(scheduler, request("a", 16))
        _, updates = run(scheduler)
        assert updates[0].request.status is RequestStatus.FINISHED_LENGTH_CAPPED

    @pytest.mark.parametrize(("min_tokens", "room"), [(4, 3), (40, 3)])
    def test_more_output_than_there_is_room_for(self, min_tokens: int, room: int) -> None:
        scheduler = make(num_blocks=4)
        with pytest.raises(InvalidRequest, match=f"at most {room} ") as error:
            add(scheduler, request("a", 13, min_tokens=min_tokens))
        assert error.value.field == "min_tokens"
        assert not scheduler.has_requests()
        add(scheduler, request("a", 13, max_tokens=3, min_tokens=room))
        run_out(scheduler)

    def test_with_forced_tokens(self) -> None:
        with pytest.raises(PromptTooLong, match=r"17 tokens.*at most 16"):
            add(make(num_blocks=4), request("a", 15, forced_token_ids=(50, 51)))

    def test_a_preempted_request_can_be_resumed_in_one_chunk(self) -> None:
        """It may have more tokens by then than any prompt had."""
        scheduler = make(
            6, enable_chunked_prefill=False, max_num_batched_tokens=24, max_model_len=24
        )
        add(scheduler, request("a", 8, 12), request("b", 8, 12))
        run_out(scheduler)
        assert scheduler.stats.num_preemptions > 0


class TestAdapters:
    def test_another_one_waits_until_there_is_room(self) -> None:
        scheduler = make(20, max_loras=1)
        add(
            scheduler,
            request("x", 3, 2, lora_name="x"),
            request("y", 3, 2, lora_name="y"),
            request("x2", 3, 2, lora_name="x"),
            request("none", 3, 2),
        )
        step, _ = run(scheduler)
        assert starts(step) == ["x", "x2", "none"]
        run(scheduler)
        step, _ = run(scheduler)
        assert starts(step) == ["y"]

    def test_one_that_seems_to_be_at_its_end_still_counts(self) -> None:
        """Its load may have failed, and then it goes on beside the other one."""
        scheduler = make(20, RemotePrefill(at_once={"x": 4}), max_loras=1)
        add(scheduler, request("x", 5, 1, lora_name="x"), request("y", 5, 2, lora_name="y"))
        first = scheduler.schedule()
        second = scheduler.schedule()
        assert second.num_scheduled_tokens == {}
        finish(scheduler, first, {"x": [7]}, invalid=first.scheduled_new_reqs[0].block_ids[:1])
        third = scheduler.schedule()
        assert third.num_scheduled_tokens == {"x": 5}
        finish(scheduler, second)
        finish(scheduler, third, {"x": [7]})
        run_out(scheduler)

    def test_a_loaded_request_that_waits_for_an_adapter_blocks_nobody_for_ever(self) -> None:
        """When nothing runs it gives up its blocks, or starts, whatever it was passed over for."""
        connector = RemotePrefill(remote={"loaded"})
        scheduler = make(4, connector, policy="priority", max_loras=1)
        add(scheduler, request("loaded", 8, priority=1, lora_name="x"))
        run(scheduler)
        add(scheduler, request("runs", 3, 2, lora_name="y"))
        run(scheduler, recving={"loaded": (9,)})
        run(scheduler)
        waits = scheduler.skipped_waiting.waits_for(scheduler.requests["loaded"])
        assert waits is Wait.LORA
        add(scheduler, request("urgent", 12, priority=0, arrival_time=1.0))
        run_out(scheduler)


class TestGrammars:
    def test_a_request_waits_for_its_grammar_and_for_nothing_else(self) -> None:
        scheduler = make(20)
        add(scheduler, request("a", 4, awaits_grammar=True), request("b", 4))
        awaits = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        assert scheduler.requests["a"].status is awaits
        step, _ = run(scheduler)
        assert starts(step) == ["b"]
        assert step.admission_ended_by is None
        scheduler.grammar_ready("a")
        scheduler.grammar_ready("a")
        scheduler.grammar_ready("nobody")
        scheduler.grammar_ready("b")
        step, _ = run(scheduler)
        assert starts(step) == ["a"]

    def test_it_may_be_aborted_meanwhile(self) -> None:
        scheduler = make(20)
        add(scheduler, request("a", 4, awaits_grammar=True))
        abort(scheduler, "a")
        scheduler.grammar_ready("a")
        step, _ = run(scheduler)
        assert step.finished_req_ids == ["a"]
        assert not scheduler.has_requests()


class TestDrafts:
    def test_they_end_at_max_model_len(self) -> None:
        scheduler = make(
            20,
            spec_method="ngram",
            num_speculative_tokens=4,
            async_scheduling=False,
            max_model_len=12,
        )
        add(scheduler, request("a", 8))
        run(scheduler)
        scheduler.update_draft_token_ids({"a": [7, 7, 7, 7], "nobody": [7]})
        step = scheduler.schedule()
        assert step.num_scheduled_tokens == {"a": 3}  # of the tokens 8 to 11 all but the last
        assert step.scheduled_spec_tokens == {"a": [7, 7]}
        updates = finish(scheduler, step, {"a": [7, 7, 9]})
        assert list(updates[0].new_token_ids) == [7, 7, 9]
        assert updates[0].request.status is RequestStatus.FINISHED_LENGTH_CAPPED

    @pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
    def test_they_end_with_the_pool(self, method: str) -> None:
        """Slots that nobody could ever have make no request give up its blocks."""
        scheduler = make(3, spec_method=method, num_speculative_tokens=4, async_scheduling=False)
        add(scheduler, request("a", 7, 20))
        while scheduler.has_requests():
            run(scheduler)
            scheduler.update_draft_token_ids({"a": [9, 9, 9, 9]})
            step = scheduler.schedule()
            finish(scheduler, step, {i: [7] for i in step.num_scheduled_tokens})
        assert scheduler.stats.num_preemptions == 0

    def test_those_of_a_request_amid_its_prompt_are_ignored(self) -> None:
        scheduler = make(
            20,
            spec_method="ngram",
            num_speculative_tokens=2,
            async_scheduling=False,
            max_num_batched_tokens=6,
        )
        add(scheduler, request("a", 8))
        run(scheduler)
        scheduler.update_draft_token_ids({"a": [7, 7]})
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 2}
        assert step.scheduled_spec_tokens == {}

    def test_rejected_ones_are_nothing_to_a_request_that_had_to_start_over(self) -> None:
        scheduler = make(20, spec_method="ngram", num_speculative_tokens=3, async_scheduling=False)
        add(scheduler, request("a", 8))
        run(scheduler)
        scheduler.update_draft_token_ids({"a": [7, 8, 9]})
        step = scheduler.schedule()
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        updates = finish(scheduler, step, {"a": [7, 5]})
        assert list(updates[0].new_token_ids) == [7, 5]
        one = scheduler.requests["a"]
        assert (one.num_computed_tokens, one.num_tokens) == (0, 11)
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 11}


class TestPriority:
    def test_equals_do_not_take_each_others_blocks_for_ever(self) -> None:
        scheduler = make(
            5,
            policy="priority",
            scheduler_reserve_full_isl=False,
            caching=False,
            long_prefill_token_threshold=2,
        )
        add(scheduler, request("a", 12, 4), request("b", 12, 4))
        run_out(scheduler, 80)
        assert running(scheduler) == []

    def test_a_victim_in_front_costs_nobody_a_turn(self) -> None:
        scheduler = make(6, policy="priority")
        add(scheduler, request("idle", 8, priority=2))
        run(scheduler)
        add(scheduler, request("urgent", 8, priority=0), request("mild", 3, priority=1))
        run(scheduler)
        assert running(scheduler) == ["idle", "urgent", "mild"]
        step, _ = run(scheduler)
        assert step.preempted_req_ids == ["idle"]
        assert list(step.num_scheduled_tokens) == ["urgent", "mild"]
        run_out(scheduler)
