"""Jobs whose prefill has not started: they hold no block and no place in the scheduler yet.

Reserved, idle blocks are decode capacity lost. So a job waits here until P says that it computes
the first chunk, and then enters the scheduler with the arrival time that it came with.
"""

from __future__ import annotations

from collections.abc import Callable

from engine import ActiveJob


class Intake:
    """Waiting jobs by key. `admit` hands a job on to the scheduler."""

    def __init__(self, admit: Callable[[ActiveJob], None]) -> None:
        self._admit = admit
        self._waiting: dict[str, ActiveJob] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def add(self, job: ActiveJob) -> None:
        self._waiting[job.key] = job

    def start(self, key: str) -> None:
        """The prefill of this job has started. Harmless if it is not (or no more) here."""
        job = self._waiting.pop(key, None)
        if job is not None:
            self._admit(job)

    def drop(self, key: str) -> bool:
        """Forget the job; whether it was here."""
        return self._waiting.pop(key, None) is not None
