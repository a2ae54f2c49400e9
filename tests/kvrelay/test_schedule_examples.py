"""The scenarios in examples/schedules do what they and their comments say.

The figures were worked out by hand; where a run of vLLM's scheduler with the same requests was
recorded, it says the same.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from cluster.yaml_file import load_yaml
from kvrelay.schedule_file import ScheduleFile
from scheduler.scenario import Ending, Outcome, ScenarioRun
from scheduler.scenario_player import play

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "schedules"
RECORDED = ROOT / "tests" / "data" / "schedules"


def example(name: str) -> ScenarioRun:
    return play(load_yaml(EXAMPLES / f"{name}.yaml", ScheduleFile).scenario)


def given(played: ScenarioRun) -> list[dict[str, int]]:
    return [step.num_scheduled_tokens for step in played.steps]


def ttft(played: ScenarioRun) -> dict[str, int | None]:
    return {i: result.steps_to_first_token for i, result in played.results.items()}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_says_what_to_look_at_and_runs_to_its_end(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# Look at ")
    schedule = load_yaml(path, ScheduleFile)
    assert len(schedule.about) > 50
    assert play(schedule.scenario).ending is Ending.COMPLETE


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("chunked-prefill", "worked_a_chunked_budget8"),
        ("slot-refill", "worked_b_budget4_seqs4"),
        ("five-prompts-three-seats", "worked_c_five_prompts_seqs3"),
        ("five-prompts-four-seats", "worked_c_five_prompts_seqs4"),
        ("chunking-off", "worked_d_chunked_off_waits"),
        ("long-prompt-threshold", "worked_f_threshold4"),
        ("preemption", "worked_h_ten_blocks_fcfs_10usable"),
    ],
)
def test_the_recorded_run_says_the_same(name: str, recorded: str) -> None:
    played = example(name)
    steps = json.loads(gzip.decompress((RECORDED / f"{recorded}.json.gz").read_bytes()))["steps"]
    expected = [step["expect"] for step in steps if step["expect"]["num_scheduled_tokens"]]
    assert [list(tokens.items()) for tokens in given(played)] == [
        [tuple(pair) for pair in step["num_scheduled_tokens"]] for step in expected
    ]
    for step, recorded_step in zip(played.steps, expected, strict=True):
        assert list(step.preempted) == recorded_step.get("preempted", [])
        assert list(step.waiting) == recorded_step.get("waiting", [])


def test_chunked_prefill() -> None:
    played = example("chunked-prefill")
    assert given(played) == [
        {"A": 2, "B": 2},
        {"A": 1, "B": 1, "C": 6},
        {"A": 1, "B": 1, "C": 4, "D": 2},
        {"A": 1, "B": 1, "C": 1, "D": 1},
        {"A": 1, "B": 1, "C": 1, "D": 1},
        {"A": 1, "B": 1, "C": 1, "D": 1},
        {"A": 1, "B": 1, "D": 1},
        {"A": 1, "B": 1},
    ]
    assert ttft(played) == {"A": 1, "B": 1, "C": 2, "D": 3}
    assert played.steps[1].waiting["D"].label == "tokens"


def test_slot_refill() -> None:
    played = example("slot-refill")
    assert given(played) == [
        {"A": 1, "B": 1, "C": 1, "D": 1},
        {"A": 1, "B": 1, "C": 1, "D": 1},
        {"A": 1, "C": 1, "D": 1, "E": 1},
        {"A": 1, "D": 1, "E": 2},
        {"D": 1, "E": 2},
        {"E": 1},
        {"E": 1},
    ]
    assert played.steps[1].waiting["E"].label == "a seat"


def test_five_prompts() -> None:
    abc, de = dict.fromkeys("ABC", 2), dict.fromkeys("DE", 2)
    one = [dict.fromkeys("ABC", 1), dict.fromkeys("DE", 1)]
    three = example("five-prompts-three-seats")
    assert given(three) == [abc, one[0], one[0], de, one[1], one[1]]
    assert three.steps[0].num_tokens == 6, "two tokens of the budget are left, but no seat"
    four = example("five-prompts-four-seats")
    decodes = dict.fromkeys("ABCD", 1)
    assert given(four) == [
        *(dict.fromkeys("ABCD", 2), decodes, decodes),
        *({"E": 2}, {"E": 1}, {"E": 1}),
    ]


def test_chunking_off() -> None:
    played = example("chunking-off")
    assert given(played) == [
        {"A": 2, "B": 2},
        *([{"A": 1, "B": 1}] * 3),
        {"B": 1, "C": 7},
        *({"D": 3}, {"D": 1}, {"D": 1}),
    ]
    assert played.results["X"].outcome is Outcome.REFUSED
    assert played.results["C"].num_output_tokens == 1
    assert [played.steps[n].waiting["D"].reason for n in (1, 2, 3)] == ["behind C"] * 3


def test_chunking_on() -> None:
    played = example("chunking-on")
    assert given(played) == [
        {"A": 2, "B": 2},
        {"A": 1, "B": 1, "C": 6},
        {"A": 1, "B": 1, "C": 1, "D": 3, "X": 2},
        {"A": 1, "B": 1, "C": 1, "D": 1, "X": 4},
        {"B": 1, "C": 1, "D": 1, "X": 4},
        *({"X": 1}, {"X": 1}),
    ]
    assert ttft(played) == {"A": 1, "B": 1, "C": 2, "D": 2, "X": 4}


def test_long_prompt_threshold() -> None:
    played = example("long-prompt-threshold")
    assert given(played)[1] == {"A": 1, "B": 1, "C": 4, "D": 4, "E": 4}
    # 100 tokens in chunks of 4 are 25 steps, from step 1 on.
    assert ttft(played) == {"A": 1, "B": 1, "C": 25, "D": 1, "E": 1}


@pytest.mark.parametrize(("block_size", "hits"), [(20, (1000, 980)), (16, (992, 992))])
def test_cached_prefix(block_size: int, hits: tuple[int, int]) -> None:
    played = example(f"cached-prefix-blocks-of-{block_size}")
    cached = [result.num_cached_tokens for result in played.results.values()]
    assert cached == [*hits, 0]
    assert given(played) == [
        *({"A": 1020 - hits[0]}, {"A": 1}, {"A": 1}, {}),
        *({"B": 1000 - hits[1]}, {"B": 1}, {"B": 1}, {}),
        *({"cold": 512}, {"cold": 508}, {"cold": 1}, {"cold": 1}),
    ]
    assert ttft(played) == {"A": 1, "B": 1, "cold": 2}


def test_preemption() -> None:
    played = example("preemption")
    preempted = {s.number: list(s.preempted) for s in played.steps if s.preempted}
    assert preempted == {2: ["D"], 5: ["C"], 13: ["B"]}
    # What each had computed when it was preempted, and computes again: B 8 + 12, C 8 + 4, D 4.
    assert {i: r.num_again for i, r in played.results.items()} == {"A": 0, "B": 20, "C": 12, "D": 4}
    again = [(s.number, i, s.shares[i].num_tokens) for s in played.steps for i in s.starts]
    assert [start for start in again if start[0] > 1] == [
        (16, "B", 21),
        (16, "C", 11),
        (19, "D", 5),
    ]
    assert max(step.blocks.used for step in played.steps) == 10


def test_three_priorities() -> None:
    played = example("three-priorities")
    chats = [steps for i, steps in ttft(played).items() if i.startswith("chat")]
    assert chats == [2, 1, 1]
    cached = {i: r.num_cached_tokens for i, r in played.results.items() if i.startswith("rag")}
    assert cached == {"rag-1": 0, "rag-2": 64, "rag-3": 64}
    preempted = [i for i, result in played.results.items() if result.num_preemptions]
    assert preempted == ["batch-4"]
    decodes = {"batch-1": 1, "batch-2": 1, "batch-3": 1}
    assert given(played)[4] == decodes | {"rag-1": 10, "chat-1": 10, "batch-4": 41}
