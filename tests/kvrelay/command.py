"""A command that has ended in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str

    def check_refused(self, *words: str) -> None:
        """It failed as every wrong command does: one line that says why."""
        assert self.status == 2
        assert self.stderr.startswith("error: ")
        assert self.stderr.count("\n") == 1
        assert self.stderr.endswith("\n")
        assert len(self.stderr) < 600, "a line that can be read"
        for word in words:
            assert word in self.stderr


Kvrelay = Callable[..., Ended]
