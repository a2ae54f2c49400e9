"""What the scheduler does beyond the recorded runs, and what must hold after every step."""

from __future__ import annotations

import pytest

from protocol import PromptTooLong
from scheduler import RequestStatus
from tests.scheduler.small_scheduler import RemotePrefill, make, request, run


class TestRemotePrefill:
    def test_a_request_is_parked_and_goes_on_at_its_second_token(self) -> None:
        connector = RemotePrefill(remote={"a"})
        scheduler = make(connector=connector)
        scheduler.add_request(request("a", 10))
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {}
        assert [r.status for r in scheduler.skipped_waiting] == [
            RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        assert len(connector.reserved["a"]) == 3
        run(scheduler, recving={"a": (42,)})
        step, updates = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 1}
        assert step.scheduled_new_reqs[0].token_ids[-1] == 42
        assert [(u.position, list(u.new_token_ids)) for u in updates] == [(1, [7])]
        assert scheduler.stats.prompt_computed == 0
        assert scheduler.stats.prompt_loaded == 10

    def test_a_load_without_a_token_computes_the_last_one_again(self) -> None:
        scheduler = make(connector=RemotePrefill(remote={"a"}))
        scheduler.add_request(request("a", 8))
        run(scheduler)
        run(scheduler, recving={"a": ()})
        _, updates = run(scheduler)
        assert [(u.position, list(u.new_token_ids)) for u in updates] == [(0, [7])]

    def test_a_token_that_ends_the_request_ends_it_before_promotion(self) -> None:
        scheduler = make(connector=RemotePrefill(remote={"a"}))
        scheduler.add_request(request("a", 8))
        run(scheduler)
        _, updates = run(scheduler, recving={"a": (3,)})
        assert [(u.finished, list(u.new_token_ids), u.position) for u in updates] == [(True, [], 1)]
        assert not scheduler.has_requests()
        assert scheduler.block_counts().used == 0

    def test_the_blocks_of_an_aborted_load_are_in_quarantine_until_it_has_ended(self) -> None:
        scheduler = make(connector=RemotePrefill(remote={"a"}))
        scheduler.add_request(request("a", 12))
        run(scheduler)
        assert scheduler.block_counts().used == 3
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        run(scheduler)
        counts = scheduler.block_counts()
        assert (counts.used, counts.quarantined, counts.balanced) == (0, 3, True)
        run(scheduler, recving={"a": (5,)})
        assert scheduler.block_counts().quarantined == 0
        assert not scheduler.has_requests()

    def test_running_requests_keep_headroom(self) -> None:
        connector = RemotePrefill(remote={"a", "b", "c"})
        scheduler = make(connector=connector, max_parked_blocks=5)
        for name in ("a", "b", "c"):
            scheduler.add_request(request(name, 12))
        scheduler.add_request(request("local", 4))
        step, _ = run(scheduler)
        assert list(connector.reserved) == ["a"]
        assert step.num_scheduled_tokens == {"local": 4}  # passed over, not in the way
        assert [r.request_id for r in scheduler.skipped_waiting] == ["a", "b", "c"]
        run(scheduler, recving={"a": (9,)})
        run(scheduler)
        assert list(connector.reserved) == ["a", "b"]

    def test_loaded_requests_do_not_wait_behind_one_that_needs_their_blocks(self) -> None:
        connector = RemotePrefill(remote={"a", "urgent"})
        scheduler = make(num_blocks=4, connector=connector, policy="priority")
        scheduler.add_request(request("a", 12, priority=1))
        run(scheduler)
        scheduler.add_request(request("urgent", 12, priority=0))
        run(scheduler, recving={"a": (9,)})
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 1}

    def test_loaded_requests_that_all_lack_a_block_do_not_wait_for_each_other(self) -> None:
        connector = RemotePrefill(remote={"a", "b"})
        scheduler = make(num_blocks=4, connector=connector)
        scheduler.add_request(request("a", 8))
        scheduler.add_request(request("b", 8))
        run(scheduler)
        step, _ = run(scheduler, recving={"a": (9,), "b": (9,)})
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 1}
        assert scheduler.stats.num_preemptions == 1
        for _ in range(40):
            run(scheduler)
        assert not scheduler.has_requests()


class TestPins:
    def test_pinned_blocks_are_kept_until_they_are_sent(self) -> None:
        scheduler = make(connector=RemotePrefill(pin_all=True))
        scheduler.add_request(request("a", 10, max_tokens=1))
        run(scheduler)
        assert scheduler.block_counts().used == 3
        run(scheduler, sending=("a",))
        assert scheduler.block_counts().used == 0

    def test_a_pin_is_given_up_before_anybody_is_preempted(self) -> None:
        scheduler = make(num_blocks=6, connector=RemotePrefill(pin_all=True))
        scheduler.add_request(request("a", 16, max_tokens=1))
        run(scheduler)
        scheduler.add_request(request("b", 16, max_tokens=1))
        step, _ = run(scheduler)
        assert step.num_scheduled_tokens == {"b": 16}
        assert scheduler.stats.num_revoked_pins == 1
        assert scheduler.stats.num_preemptions == 0


class TestForcedTokens:
    def test_they_count_as_output_and_are_never_sampled_again(self) -> None:
        scheduler = make()
        scheduler.add_request(request("a", 6, max_tokens=4, forced_token_ids=(50, 51)))
        step, updates = run(scheduler)
        assert step.num_scheduled_tokens == {"a": 8}
        assert [(u.position, list(u.new_token_ids)) for u in updates] == [(2, [7])]
        _, updates = run(scheduler)
        assert updates[0].finished
        assert updates[0].request.output_token_ids == [50, 51, 7, 7]


class TestRefusals:
    def test_a_prompt_beyond_the_model(self) -> None:
        with pytest.raises(PromptTooLong, match=r"65 tokens.*max_model_len allows at most 64"):
            make(num_blocks=100).add_request(request("a", 65))

    def test_a_prompt_beyond_the_pool(self) -> None:
        with pytest.raises(PromptTooLong, match="at most 40"):
            make(num_blocks=10).add_request(request("a", 41))
