from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from engine.weights import NoProgress, Stage
from engine.weights.staging import build_once
from tests.engine.weights.conftest import Steps


def fill(text: str, empty: Path) -> None:
    assert not any(empty.iterdir())
    (empty / "file").write_text(text)


def build(target: Path, text: str) -> None:
    build_once(target, lambda empty: fill(text, empty), NoProgress())


def test_builds_once(tmp_path: Path) -> None:
    target = tmp_path / "model" / "state"
    build(target, "first")
    build(target, "second")
    assert (target / "file").read_text() == "first"
    assert sorted(path.name for path in target.parent.iterdir()) == [".lock", "state"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model" / "state"

    def fail(empty: Path) -> None:
        fill("half", empty)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        build_once(target, fail, NoProgress())
    assert [path.name for path in target.parent.iterdir()] == [".lock"]
    build(target, "whole")
    assert (target / "file").read_text() == "whole"


def test_what_a_killed_builder_left_is_thrown_away(tmp_path: Path) -> None:
    target = tmp_path / "model" / "state"
    partial = target.with_name("state.partial")
    partial.mkdir(parents=True)
    (partial / "half").touch()
    build(target, "whole")
    assert [path.name for path in target.iterdir()] == ["file"]


def test_an_older_state_is_removed(tmp_path: Path) -> None:
    build(tmp_path / "model" / "old", "old")
    build(tmp_path / "model" / "new", "new")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [".lock", "new"]


def test_waits_for_another_builder_and_says_so(tmp_path: Path, steps: Steps) -> None:
    target = tmp_path / "model" / "state"
    target.parent.mkdir()
    waiting = threading.Thread(
        target=build_once, args=(target, lambda empty: fill("second", empty), steps)
    )
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        while not steps.of(Stage.WAIT):
            pass
        target.mkdir()
        (target / "file").write_text("first")
    waiting.join()
    assert (target / "file").read_text() == "first"
