"""What most tests of the weights need."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.weights import ModelFiles, ModelStore, Stage


class Steps:
    """A progress sink that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[Stage, int, int]] = []

    def update(self, stage: Stage, done: int, total: int) -> None:
        self.seen.append((stage, done, total))

    def of(self, stage: Stage) -> list[tuple[int, int]]:
        return [(done, total) for seen, done, total in self.seen if seen == stage]


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """The real model, from the cache that the command line uses too."""
    return ModelStore(Path.home() / ".cache" / "kvrelay").resolve("smollm2-135m")
