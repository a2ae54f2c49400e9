"""Recorded runs of vLLM's V1 scheduler, replayed step by step: every decision must be the same.

`tests/data/schedules` has one run per scenario. Where recordings differ from ours, they do so on
purpose, and the test says where.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from protocol import ConfigError
from tests.scheduler.trace_replay import Replay

DATA = Path(__file__).parent.parent / "data" / "schedules"
DIFFERENT = ("hazard_priority_uncomputed_hit", "worked_d_chunked_off_too_long")
NAMES = sorted(path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz"))


def load(name: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return trace


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DIFFERENT])
def test_every_decision_is_the_recorded_one(name: str) -> None:
    assert Replay(load(name)).first_difference() is None


def test_blocks_that_were_never_computed_are_not_hit() -> None:
    """A victim that was scheduled in the same step leaves nothing in the cache."""
    difference = Replay(load("hazard_priority_uncomputed_hit")).first_difference()
    assert difference is not None
    assert (difference.step, difference.field) == (4, "expect.num_scheduled_tokens")
    assert (difference.recorded, difference.ours) == ([["A", 6]], [["A", 8]])


def test_a_budget_below_the_longest_prompt_is_refused_without_chunked_prefill() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        Replay(load("worked_d_chunked_off_too_long"))


@pytest.mark.parametrize("kind", ["expect", "after"])
def test_a_changed_record_is_noticed(kind: str) -> None:
    trace = load("worked_h_ten_blocks_fcfs_9usable")
    changed = 0
    for number, step in enumerate(trace["steps"]):
        for field, value in step[kind].items():
            if not isinstance(value, int):
                continue
            altered = copy.deepcopy(trace)
            altered["steps"][number][kind][field] = value + 1
            difference = Replay(altered).first_difference()
            assert difference is not None
            assert (difference.step, difference.field) == (number, f"{kind}.{field}")
            changed += 1
    assert changed > 10
