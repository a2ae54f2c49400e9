"""Scenarios played to the scheduler: what a run says about its steps and its requests."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import ConfigError
from scheduler import CacheConfig, PauseState, Scheduler, SchedulerConfig, Wait
from scheduler.scenario import (
    CachedPrefix,
    Ending,
    Outcome,
    Prefix,
    Scenario,
    ScenarioRequest,
    ScenarioRun,
    Start,
    Waiting,
    Work,
)
from scheduler.scenario_player import play


def scenario(
    *requests: ScenarioRequest,
    cached: tuple[CachedPrefix, ...] = (),
    num_blocks: int = 63,
    block_size: int = 4,
    caching: bool = True,
    **config: Any,
) -> Scenario:
    cache = CacheConfig(
        num_blocks=num_blocks + 1,
        block_size=block_size,
        hash_block_size=block_size,
        enable_prefix_caching=caching,
    )
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    return Scenario(
        config=SchedulerConfig(**limits | config), cache=cache, requests=requests, cached=cached
    )


def given(played: ScenarioRun) -> list[dict[str, int]]:
    return [step.num_scheduled_tokens for step in played.steps]


A = ScenarioRequest(id="A", prompt=2, output=3)
B = ScenarioRequest(id="B", prompt=10, output=2)


def test_who_gets_what_and_when_a_request_ends() -> None:
    played = play(scenario(A, B))
    assert given(played) == [{"A": 2, "B": 6}, {"A": 1, "B": 4}, {"A": 1, "B": 1}]
    assert [list(step.finished) for step in played.steps] == [[], [], ["A", "B"]]
    assert played.ending is Ending.COMPLETE
    assert {i: r.outcome for i, r in played.results.items()} == dict.fromkeys(
        "AB", Outcome.FINISHED
    )
    b = played.results["B"]
    assert (b.first_token_step, b.steps_to_first_token, b.end_step) == (1, 2, 2)
    assert b.num_output_tokens == 2


def test_a_run_is_always_the_same() -> None:
    assert play(scenario(A, B)) == play(scenario(A, B))


def test_kinds_of_work() -> None:
    steps = play(scenario(A, B)).steps
    assert [share.work for share in steps[1].shares.values()] == [Work.DECODE, Work.PREFILL]
    assert steps[1].shares["B"].num_computed_before == 6
    assert steps[0].starts == {"A": Start(0, resumed=False), "B": Start(0, resumed=False)}


def test_totals_of_a_step() -> None:
    step = play(scenario(A, B)).steps[0]
    assert (step.num_tokens, step.budget) == (8, 8)
    assert (step.num_running, step.seats) == (2, 4)
    assert (step.blocks.used, step.blocks.total) == (3, 63)


class TestWaiting:
    def test_for_a_seat_and_behind_the_head(self) -> None:
        c = ScenarioRequest(id="C", prompt=2, output=1)
        step = play(scenario(A, B, c, max_num_seqs=1)).steps[0]
        assert step.waiting == {"B": Waiting(wait=Wait.SEAT), "C": Waiting(behind="B")}
        assert step.waiting["B"].reason == "a seat (max_num_seqs)"
        assert step.waiting["C"].reason == "behind B"

    def test_for_tokens(self) -> None:
        first = ScenarioRequest(id="first", prompt=8, output=1)
        assert play(scenario(first, A)).steps[0].waiting == {"A": Waiting(wait=Wait.TOKENS)}

    def test_for_blocks(self) -> None:
        first = ScenarioRequest(id="first", prompt=7, output=2)
        played = play(scenario(first, A, num_blocks=2, max_num_batched_tokens=16))
        assert played.steps[0].waiting == {"A": Waiting(wait=Wait.BLOCKS)}

    def test_for_an_adapter_though_others_go_on(self) -> None:
        one = ScenarioRequest(id="one", prompt=2, output=2, lora="french")
        two = ScenarioRequest(id="two", prompt=2, output=2, lora="german")
        played = play(scenario(one, two, A, max_loras=1))
        assert given(played)[0] == {"one": 2, "A": 2}
        assert played.steps[0].waiting == {"two": Waiting(wait=Wait.LORA)}
        assert "max_loras" in played.steps[0].waiting["two"].reason
        assert played.results["two"].first_token_step == 2

    @pytest.mark.parametrize("wait", Wait)
    def test_each_wait_has_words(self, wait: Wait) -> None:
        assert Waiting(wait=wait).reason
        assert "(" not in Waiting(wait=wait).label


class TestPreemption:
    """Three blocks of 4 tokens: A takes the third one when it computes its ninth token."""

    @pytest.fixture
    def played(self) -> ScenarioRun:
        a = ScenarioRequest(id="A", prompt=4, output=6)
        b = ScenarioRequest(id="B", prompt=3, output=3, arrival=2)
        return play(scenario(a, b, num_blocks=3, caching=False))

    def test_who_makes_way(self, played: ScenarioRun) -> None:
        # A: 4 tokens in step 0, then one a step: its second block in step 1, its third in step 5.
        # B has its prompt in step 2, its last slot of one block in step 3, and lacks one in step 4.
        assert given(played)[:5] == [
            {"A": 4},
            {"A": 1},
            {"A": 1, "B": 3},
            {"A": 1, "B": 1},
            {"A": 1},
        ]
        assert list(played.steps[4].preempted) == ["B"]
        assert played.steps[4].waiting == {"B": Waiting(wait=Wait.PREEMPTION)}
        assert played.steps[5].finished == ["A"]

    def test_what_is_computed_again(self, played: ScenarioRun) -> None:
        share = played.steps[6].shares["B"]
        assert (share.work, share.num_tokens, share.num_again) == (Work.RECOMPUTE, 5, 4)
        assert played.steps[6].starts == {"B": Start(0, resumed=True)}
        assert (played.results["B"].num_preemptions, played.num_preemptions) == (1, 1)
        assert played.results["B"].num_again == 4
        assert played.results["B"].outcome is Outcome.FINISHED


def test_one_that_preempts_itself_leaves_others_without_tokens() -> None:
    """As in the recorded run worked_i_self_preemption_ends_step."""
    a = ScenarioRequest(id="A", prompt=34, output=4, priority=5)
    c = ScenarioRequest(id="C", arrival=1, prompt=4, output=14, priority=0)
    played = play(
        scenario(
            *(a, c),
            num_blocks=12,
            caching=False,
            policy="priority",
            max_num_batched_tokens=16,
            max_model_len=48,
            long_prefill_token_threshold=8,
        )
    )
    step = played.steps[7]
    assert (step.num_tokens, list(step.preempted), list(step.idle)) == (0, ["A"], ["C"])
    assert "A had to preempt itself" in step.why_idle


def test_running_requests_without_budget_are_idle() -> None:
    a, b = (ScenarioRequest(id=i, prompt=12, output=2) for i in "AB")
    played = play(scenario(a, b, max_num_seqs=2, long_prefill_token_threshold=4))
    assert given(played)[0] == {"A": 4, "B": 4}
    assert [list(step.idle) for step in played.steps] == [[]] * len(played.steps)
    played = play(scenario(A, B, max_num_scheduled_tokens=1))
    assert all(step.why_idle.startswith("the budget") for step in played.steps if step.idle)


class TestPrefixes:
    BOOK = Prefix(name="book", tokens=8)

    def test_equal_names_are_equal_tokens(self) -> None:
        one = ScenarioRequest(id="one", prompt=10, output=1, prefix=self.BOOK)
        two = ScenarioRequest(id="two", arrival=3, prompt=12, output=1, prefix=self.BOOK)
        other = ScenarioRequest(id="other", arrival=3, prompt=12, output=1)
        played = play(scenario(one, two, other, max_num_batched_tokens=32))
        hits = {i: result.num_cached_tokens for i, result in played.results.items()}
        assert hits == {"one": 0, "two": 8, "other": 0}

    def test_what_is_cached_before_the_first_step(self) -> None:
        a = ScenarioRequest(id="A", prompt=10, output=1, prefix=self.BOOK)
        played = play(scenario(a, cached=(CachedPrefix(prefix=self.BOOK),)))
        assert given(played) == [{"A": 2}]
        assert played.steps[0].starts == {"A": Start(8, resumed=False)}
        assert list(played.results) == ["A"], "what filled the cache is not shown"

    @pytest.mark.parametrize("other", [{"cache_salt": "mine"}, {"lora": "french"}], ids=str)
    def test_a_salt_and_an_adapter_separate(self, other: dict[str, Any]) -> None:
        a = ScenarioRequest(id="A", prompt=10, output=1, prefix=self.BOOK, **other)
        for cached, hit in (
            (CachedPrefix(prefix=self.BOOK), 0),
            (CachedPrefix(prefix=self.BOOK, **other), 8),
        ):
            assert play(scenario(a, cached=(cached,))).results["A"].num_cached_tokens == hit


class TestEndings:
    def test_refused(self) -> None:
        long = ScenarioRequest(id="long", arrival=1, prompt=65, output=1)
        played = play(scenario(A, long))
        assert "65 tokens" in played.steps[1].refused["long"]
        result = played.results["long"]
        assert (result.outcome, result.end_step) == (Outcome.REFUSED, 1)
        assert result.steps_to_first_token is None
        assert played.ending is Ending.COMPLETE

    def test_aborted(self) -> None:
        a = ScenarioRequest(id="A", prompt=2, output=9, abort=2)
        played = play(scenario(a))
        assert list(played.steps[2].aborted) == ["A"]
        assert given(played) == [{"A": 2}, {"A": 1}, {}]
        result = played.results["A"]
        assert (result.outcome, result.num_output_tokens) == (Outcome.ABORTED, 2)

    def test_an_abort_of_one_that_has_ended_is_nothing(self) -> None:
        a = ScenarioRequest(id="A", prompt=2, output=1, abort=1)
        played = play(scenario(a, B))
        assert not any(step.aborted for step in played.steps)
        assert played.results["A"].outcome is Outcome.FINISHED

    def test_the_number_of_steps_is_bounded(self) -> None:
        played = play(scenario(A, B), max_steps=2)
        assert (played.ending, len(played.steps)) == (Ending.TRUNCATED, 2)
        assert played.results["A"].outcome is Outcome.UNFINISHED

    def test_a_run_that_does_not_move_is_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Paused(Scheduler):
            def __init__(self, config: SchedulerConfig, cache_config: CacheConfig) -> None:
                super().__init__(config, cache_config)
                self.set_pause_state(PauseState.PAUSED_ALL)

        monkeypatch.setattr("scheduler.scenario_player.Scheduler", Paused)
        late = ScenarioRequest(id="late", arrival=5, prompt=2, output=1)
        played = play(scenario(A, late))
        assert played.ending is Ending.STUCK
        assert len(played.steps) == 7, "it may go on as long as somebody is to come"

    def test_a_pause_in_arrivals_is_not_the_end(self) -> None:
        late = ScenarioRequest(id="late", arrival=9, prompt=2, output=1)
        played = play(scenario(A, late))
        assert (played.ending, len(played.steps)) == (Ending.COMPLETE, 10)


def test_requests_of_a_step_arrive_in_the_order_of_the_scenario() -> None:
    ids = [f"r{number}" for number in (10, 9, 8)]  # neither the order of numbers nor of texts
    requests = [ScenarioRequest(id=i, prompt=2, output=1) for i in ids]
    assert list(given(play(scenario(*requests, policy="priority")))[0]) == ids


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", {"prompt": 0}),
        ("output", {"output": 0}),
        ("arrival", {"arrival": -1}),
        ("abort", {"arrival": 3, "abort": 2}),
        ("prefix", {"prefix": Prefix(name="book", tokens=3)}),
        ("prefix", {"prefix": Prefix(name="book", tokens=0)}),
    ],
    ids=str,
)
def test_a_wrong_request(field: str, values: dict[str, Any]) -> None:
    right: dict[str, Any] = {"id": "A", "prompt": 2, "output": 2}
    with pytest.raises(ConfigError) as error:
        ScenarioRequest(**right | values)
    assert error.value.field == field


class TestWrongScenarios:
    def test_nobody(self) -> None:
        with pytest.raises(ConfigError, match="requests"):
            scenario()

    def test_the_same_id_twice(self) -> None:
        with pytest.raises(ConfigError, match="'A'"):
            scenario(A, A)

    def test_drafts(self) -> None:
        with pytest.raises(ConfigError, match="draft"):
            scenario(A, spec_method="ngram", num_speculative_tokens=1, async_scheduling=False)

    def test_a_cached_prompt_without_a_cache(self) -> None:
        cached = (CachedPrefix(prefix=Prefix(name="book", tokens=8)),)
        with pytest.raises(ConfigError, match="enable_prefix_caching"):
            scenario(A, cached=cached, caching=False)

    def test_a_cached_prompt_that_does_not_fit(self) -> None:
        cached = (CachedPrefix(prefix=Prefix(name="book", tokens=65)),)
        with pytest.raises(ConfigError, match=r"'book'.*65"):
            scenario(A, cached=cached)
