"""Recorded runs of vLLM's V1 scheduler, replayed step by step: every decision must be the same.

`tests/data/schedules` has one run per scenario; where the whole collection lies beside this
repository, all of it is replayed. Where recordings differ from ours, they do so on purpose, and the
replay says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol import ConfigError, PromptTooLong
from scheduler.replay import (
    Difference,
    Refused,
    Replay,
    expected_difference,
    load,
    replay,
    scheduler_config,
)

DATA = Path(__file__).parent.parent / "data" / "schedules"
COLLECTION = Path(__file__).parents[3] / "shared" / "conformance"
RUNS = {path.name.removesuffix(".json.gz"): path for path in sorted(DATA.glob("*.json.gz"))}
RUNS |= {path.stem: path for path in sorted(COLLECTION.glob("*.json"))}
DIFFERENT = ("hazard_priority_uncomputed_hit", "worked_d_chunked_off_too_long")


@pytest.mark.parametrize("name", [name for name in RUNS if name not in DIFFERENT])
def test_every_decision_is_the_recorded_one(name: str) -> None:
    trace = load(RUNS[name])
    assert replay(trace, exact_blocks=True) is None
    assert replay(trace) is None


def test_blocks_that_were_never_computed_are_not_hit() -> None:
    """A victim that was scheduled in the same step leaves nothing in the cache."""
    trace = load(RUNS["hazard_priority_uncomputed_hit"])
    difference = replay(trace)
    assert isinstance(difference, Difference)
    assert (difference.step, difference.field) == (4, "expect.num_scheduled_tokens")
    assert (difference.recorded, difference.ours) == ([["A", 6]], [["A", 8]])
    assert expected_difference(trace, difference) is not None


def test_settings_and_prompts_that_block_the_queue_for_ever_are_refused() -> None:
    trace = load(RUNS["worked_d_chunked_off_too_long"])
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        Replay(trace)
    refused = replay(trace)
    assert isinstance(refused, Refused)
    assert [type(error) for error in refused.errors] == [ConfigError, PromptTooLong]
    assert expected_difference(trace, refused) is not None
    with pytest.raises(ConfigError):
        scheduler_config(trace.config)
