"""Settings that cannot work are refused, by the name of the field that the user typed."""

from __future__ import annotations

import logging

import pytest

from protocol import ConfigError
from scheduler import CacheConfig, SchedulerConfig, SchedulerKnobs

GOOD: dict[str, object] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "async_scheduling": False,
}


def config(**values: object) -> SchedulerConfig:
    return SchedulerConfig(**(GOOD | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_num_seqs", {"max_num_seqs": 0}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 0}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 3}),
        ("max_num_scheduled_tokens", {"max_num_scheduled_tokens": 0}),
        ("max_num_scheduled_tokens", {"max_num_scheduled_tokens": 65}),
        ("max_model_len", {"max_model_len": 0}),
        ("policy", {"policy": "lottery"}),
        ("kv_load_failure_policy", {"kv_load_failure_policy": "panic"}),
        ("long_prefill_token_threshold", {"long_prefill_token_threshold": -1}),
        ("long_prefill_token_threshold", {"long_prefill_token_threshold": 65}),
        ("max_num_batched_tokens", {"enable_chunked_prefill": False, "max_model_len": 65}),
        (
            "max_num_scheduled_tokens",
            {"enable_chunked_prefill": False, "max_num_scheduled_tokens": 63},
        ),
        ("max_num_partial_prefills", {"max_num_partial_prefills": 0}),
        (
            "max_num_partial_prefills",
            {"max_num_partial_prefills": 2, "enable_chunked_prefill": False},
        ),
        ("max_long_partial_prefills", {"max_long_partial_prefills": 0}),
        (
            "max_long_partial_prefills",
            {"max_num_partial_prefills": 2, "max_long_partial_prefills": 3},
        ),
        ("waiting_preempts_running", {"waiting_preempts_running": True}),
        ("max_parked_blocks", {"max_parked_blocks": 0}),
        ("max_loras", {"max_loras": 0}),
        ("spec_method", {"spec_method": "oracle", "num_speculative_tokens": 1}),
        ("num_speculative_tokens", {"spec_method": "ngram"}),
        ("num_speculative_tokens", {"num_speculative_tokens": 2}),
        ("num_speculative_tokens", {"num_speculative_tokens": -1}),
        (
            "async_scheduling",
            {"spec_method": "ngram", "num_speculative_tokens": 2, "async_scheduling": True},
        ),
    ],
)
def test_what_cannot_work_is_named(field: str, values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as error:
        config(**values)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_blocks", {"num_blocks": 1}),
        ("block_size", {"num_blocks": 9, "block_size": 0}),
        ("block_size", {"num_blocks": 9, "block_size": 24}),
        ("hash_block_size", {"num_blocks": 9, "hash_block_size": 0}),
    ],
)
def test_what_is_no_pool_is_named(field: str, values: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as error:
        CacheConfig(**values)  # type: ignore[arg-type]
    assert error.value.field == field


def test_what_can_go_together() -> None:
    one = config(enable_chunked_prefill=False, max_num_partial_prefills=1)
    assert one.token_budget == 64
    assert config(max_num_scheduled_tokens=5).token_budget == 5
    assert config(waiting_preempts_running=True, policy="priority").waiting_preempts_running
    assert config(spec_method="eagle", num_speculative_tokens=3).num_lookahead_tokens == 3
    assert config(spec_method="draft_model", num_speculative_tokens=3).num_lookahead_tokens == 3
    assert config(spec_method="ngram", num_speculative_tokens=3).num_lookahead_tokens == 0


@pytest.mark.parametrize(
    ("values", "threshold"),
    [
        ({}, 0),
        ({"long_prefill_token_threshold": 9}, 9),
        ({"max_num_partial_prefills": 1}, 0),
        ({"max_num_partial_prefills": 1, "max_long_partial_prefills": 1}, 0),
        ({"max_num_partial_prefills": 2}, 40),
        ({"max_num_partial_prefills": 2, "long_prefill_token_threshold": 9}, 9),
        ({"max_num_partial_prefills": 3, "max_long_partial_prefills": 2}, 40),
        ({"max_long_partial_prefills": 1}, 40),
        ({"max_num_partial_prefills": 2, "max_model_len": 10}, 1),
    ],
)
def test_the_threshold_is_4_percent_with_several_partial_prefills(
    values: dict[str, object], threshold: int
) -> None:
    assert config(**({"max_model_len": 1000} | values)).prefill_threshold == threshold


def test_a_step_that_can_never_be_so_large_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="scheduler.config"):
        config(max_num_batched_tokens=256)
        assert caplog.messages == []
        config(max_num_batched_tokens=257)
    assert len(caplog.messages) == 1
    assert "257" in caplog.messages[0]
    assert "256" in caplog.messages[0]


def test_the_knobs_are_the_same_for_a_model() -> None:
    knobs = SchedulerKnobs(max_num_seqs=7, policy="priority", async_scheduling=False)
    made = SchedulerConfig.of(knobs, max_model_len=99, max_num_batched_tokens=99)
    assert (made.max_num_seqs, made.policy, made.async_scheduling) == (7, "priority", False)
    assert (made.max_model_len, made.max_num_batched_tokens) == (99, 99)
