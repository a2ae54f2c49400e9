from __future__ import annotations

import math

import pytest

from protocol import ConfigError
from router import POLICIES, RouterConfig, get_policy


def test_the_defaults_are_valid() -> None:
    config = RouterConfig()
    assert config.local_prefill_max_tokens == 0
    assert get_policy(config.policy) is POLICIES["kv_aware"]


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_inflight_requests", 0, "at least 1"),
        ("max_queued_tokens", 0, "at least 1"),
        ("max_predicted_ttft_s", 0.0, "above 0"),
        ("max_predicted_ttft_s", math.nan, "above 0"),
        ("local_prefill_max_tokens", -1, "at least 0"),
        ("default_prefill_tokens_per_s", 0.0, "above 0"),
        ("transfer_tokens_per_s", -1.0, "above 0"),
        ("handoff_latency_s", -0.1, "at least 0"),
        ("output_headroom_tokens", 0, "at least 1"),
        ("decode_transfer_weight", -1.0, "at least 0"),
        ("max_attempts", 0, "at least 1"),
        ("max_lost_attempts", 0, "at least 1"),
        ("retry_backoff_s", -0.1, "at least 0"),
        ("retry_backoff_max_s", -0.1, "at least 0"),
        ("retry_jitter", -0.1, "at least 0"),
        ("retry_burst", 0, "at least 1"),
        ("retry_share", math.nan, "at least 0"),
        ("stall_timeout_s", 0.0, "above 0"),
        ("recovery_timeout_s", -1.0, "at least 0"),
        ("admission_wait_s", -1.0, "at least 0"),
        ("suspect_after_s", 0.0, "above 0"),
        ("slowness_weight", -0.1, "at least 0"),
        ("max_index_entries", 0, "at least 1"),
    ],
)
def test_a_value_out_of_range_names_field_and_limit(field: str, value: float, limit: str) -> None:
    with pytest.raises(ConfigError, match=limit) as caught:
        RouterConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'best'.*kv_aware, round_robin") as caught:
        get_policy("best")
    assert caught.value.field == "policy"
