"""`kvrelay verify`: what it prints, its exit status, and what it refuses."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from cluster import LocalConfig, RunnerFactory
from cluster.exactness import Difference, Evidence, WayResult
from cluster.torch_compute import torch_compute
from engine.kernels import CompiledKernels, KernelsUnavailable
from kvrelay.verify_table import describe_difference, describe_result, ways_table
from tests.cluster.exactness.faulty_model import spoiled
from tests.kvrelay.command import Kvrelay

FEW = ("--prompts", "8", "--max-tokens", "8")


@pytest.fixture
def model(tiny_model: Path) -> Path:
    try:
        CompiledKernels(batch_invariant=True)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return tiny_model


def rows(printed: str) -> Iterator[tuple[str, int, int]]:
    """(way, logits, equal) of each row."""
    for line in printed.splitlines():
        found = re.match(r"(\S.*?) {2,}(\d+) +(\d+) ", line)
        if found is not None:
            yield found[1], int(found[2]), int(found[3])


def test_a_model_that_is_exact(kvrelay: Kvrelay, model: Path) -> None:
    ended = kvrelay("verify", model)
    assert ended.status == 0, ended.stdout
    assert ended.stderr == ""
    found = list(rows(ended.stdout))
    assert len(found) >= 18
    assert all(logits == equal >= 384 for _, logits, equal in found)
    names = {name for name, _, _ in found}
    assert {"batched", "chunks of 16", "preempted", "handed off", "migrated"} <= names
    assert re.search(r"^model tiny-llama: 24 prompts of 8 to 300 tokens and 16 more", ended.stdout)
    assert re.search(r"bit for bit the same in \d+ ways \(after \d+ s\)", ended.stdout)
    assert all(len(line) <= 100 for line in ended.stdout.splitlines())


@pytest.mark.parametrize(
    "options", [("--quantization", "int8"), ("--kv-cache-dtype", "bfloat16", "--threads", "1")]
)
def test_engines_to_choose_from(kvrelay: Kvrelay, model: Path, options: tuple[str, ...]) -> None:
    ended = kvrelay("verify", model, *FEW, *options)
    assert ended.status == 0, ended.stdout
    assert ended.stderr == ""
    if "--threads" in options:
        assert "otherwise 1" in ended.stdout


def test_a_model_that_is_not(
    kvrelay: Kvrelay, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where KV is handed over layer by layer, one logit of each node is off by one ulp."""
    right = torch_compute

    def wrong(files: object, config: LocalConfig, loaded: object) -> RunnerFactory:
        def make(config: LocalConfig) -> RunnerFactory:
            return right(files, config, loaded)  # type: ignore[arg-type]

        return spoiled(make, lambda config: config.transfer.layerwise)(config)

    monkeypatch.setattr("cluster.exactness.verification.torch_compute", wrong)
    ended = kvrelay("verify", model)
    assert ended.status == 1, ended.stdout
    assert ended.stderr == ""
    wrong_rows = [row for row in rows(ended.stdout) if row[1] != row[2]]
    assert wrong_rows == [("layer by layer", 384, 382)]
    words = " ".join(ended.stdout.split())
    assert "ways failed" in words
    assert "first difference: prompt-" in words
    assert re.search(r"1 of 19 ways failed \(after \d+ s\): layer by layer", words)


def test_what_is_refused(kvrelay: Kvrelay, model: Path) -> None:
    kvrelay("verify", model, "--kernels", "torch").check_refused("needs the compiled kernels")
    kvrelay("verify", model, "--kernels", "fast").check_refused("--kernels", "compiled", "'fast'")
    kvrelay("verify", model, "--quantization", "int4").check_refused("--quantization", "int8")
    kvrelay("verify", model, "--kv-cache-dtype", "int8").check_refused("--kv-cache-dtype")
    kvrelay("verify", model, "--prompts", "7").check_refused("--prompts", "at least 8")
    kvrelay("verify", model, "--prompts", "many").check_refused("--prompts")
    kvrelay("verify", model, "--max-tokens", "7").check_refused("--max-tokens", "from 8")
    kvrelay("verify", model, "--threads", "0").check_refused("--threads", "at least 1")
    kvrelay("verify", model, "--log-level", "loud").check_refused("--log-level")
    kvrelay("verify", model, "--cache-dir", "/dev/null").check_refused("--cache-dir")


def test_a_model_that_is_not_there(kvrelay: Kvrelay, tmp_path: Path) -> None:
    ended = kvrelay("verify", tmp_path / "nothing")
    ended.check_refused("nothing")
    assert ended.stdout == ""


class TestTable:
    """What a run of a sound model on a complete machine never shows."""

    GOOD = WayResult(
        name="good", seconds=1.0, num_compared=9, num_equal=9, evidence=Evidence("it did", True)
    )
    DIFFERENCE = Difference("prompt-3", 17, 2, 4, 320, 2.5e-7)
    WRONG = WayResult(
        name="wrong",
        seconds=1.0,
        num_compared=9,
        num_equal=8,
        difference=DIFFERENCE,
        other_tokens=("prompt-3#1", "prompt-4#1"),
        evidence=Evidence("it did", True),
    )
    IDLE = WayResult(
        name="idle", seconds=1.0, num_compared=9, num_equal=9, evidence=Evidence("0 of it", False)
    )
    FAILED = WayResult(name="failed", seconds=1.0, error="no room")
    SKIPPED = WayResult(name="skipped", seconds=0.0, skipped="transport: needs an extra")
    EMPTY = WayResult(name="empty", seconds=1.0, evidence=Evidence("it did", True))

    def test_what_passes(self) -> None:
        assert self.GOOD.passed
        assert self.SKIPPED.passed
        for wrong in (self.WRONG, self.IDLE, self.FAILED, self.EMPTY):
            assert not wrong.passed

    def test_the_verdict(self) -> None:
        assert describe_result([self.GOOD], 1.4).plain == (
            "bit for bit the same in 1 ways (after 1 s)"
        )
        assert describe_result([self.GOOD, self.SKIPPED], 1.4).plain == (
            "bit for bit the same in 1 ways (after 1 s); skipped: skipped"
        )
        assert describe_result([self.GOOD, self.WRONG, self.IDLE, self.SKIPPED], 65).plain == (
            "2 of 4 ways failed (after 65 s): wrong, idle"
        )

    def test_a_difference(self) -> None:
        assert describe_difference(self.DIFFERENCE) == (
            "first difference: prompt-3 (17 tokens), output position 2: 4 of 320 logits, "
            "by up to 2.5e-07"
        )

    def test_the_rows(self) -> None:
        results = [self.GOOD, self.WRONG, self.IDLE, self.FAILED, self.SKIPPED]
        console = Console(width=160, file=io.StringIO(), record=True)
        console.print(ways_table(results, [*(r.name for r in results), "next", "later"]))
        lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
        assert lines[2:] == [
            "good 9 9 it did 1.0",
            "wrong 9 8 it did 1.0",
            describe_difference(self.DIFFERENCE),
            "other tokens in 2 outputs, such as prompt-3#1",
            "idle 9 9 did not happen: 0 of it 1.0",
            "failed failed: no room 1.0",
            "skipped skipped: transport: needs an extra 0.0",
            "next …",
            "later",
        ]
