"""What holds back a message or a write until a test lets it go."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType


class Gate:
    """A FIFO that is open for writing as long as the gate is closed. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: int | None = None

    def __enter__(self) -> Gate:
        os.mkfifo(self._path)
        self._writer = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        return self

    def open(self) -> None:
        if self._writer is not None:
            self._path.unlink()  # first: who comes later finds it open
            os.close(self._writer)
            self._writer = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.open()
