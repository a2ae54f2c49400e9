"""How long work at start-up tells a person that it is getting on."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Stage(StrEnum):
    """What is going on, and what `done` and `total` count then."""

    WAIT = "wait"  # another process prepares the same model; counts nothing (0 of 0)
    DOWNLOAD = "download"  # bytes
    CONVERT = "convert"  # tensors


class ProgressSink(Protocol):
    """Whoever renders progress. Called often, on the thread that does the work."""

    def update(self, stage: Stage, done: int, total: int) -> None:
        """`done` of `total` of this stage; a stage is over when they are equal."""
        ...


class NoProgress:
    """The sink of those who do not look."""

    def update(self, stage: Stage, done: int, total: int) -> None:
        """Nothing."""
