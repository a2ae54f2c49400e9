"""For each knob of the scheduler a value that is not its default, and what goes with that."""

from __future__ import annotations

from typing import Any

OTHER_KNOBS: dict[str, dict[str, Any]] = {
    "max_num_seqs": {"max_num_seqs": 63},
    "max_num_batched_tokens": {"max_num_batched_tokens": 511},
    "max_num_scheduled_tokens": {"max_num_scheduled_tokens": 510},
    "enable_chunked_prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
    "long_prefill_token_threshold": {"long_prefill_token_threshold": 10},
    "max_num_partial_prefills": {"max_num_partial_prefills": 3},
    "max_long_partial_prefills": {"max_long_partial_prefills": 2},
    "policy": {"policy": "priority"},
    "waiting_preempts_running": {"waiting_preempts_running": True, "policy": "priority"},
    "scheduler_reserve_full_isl": {"scheduler_reserve_full_isl": False},
    "max_parked_blocks": {"max_parked_blocks": 4},
    "kv_load_failure_policy": {"kv_load_failure_policy": "fail"},
    "max_loras": {"max_loras": 1},
    "spec_method": {
        "spec_method": "ngram",
        "num_speculative_tokens": 2,
        "async_scheduling": False,
    },
    "num_speculative_tokens": {
        "spec_method": "ngram",
        "num_speculative_tokens": 3,
        "async_scheduling": False,
    },
    "async_scheduling": {"async_scheduling": False},
}
# What the scheduler can do and the engine cannot yet.
UNSUPPORTED = {"max_loras", "spec_method", "num_speculative_tokens"}
