"""All processes that a test has started, however far they are from it by now."""

from __future__ import annotations

import contextlib
import os
import secrets

import psutil


class MarkedProcesses:
    """Known by a mark in their environment, or by a session that somebody with the mark began.

    Some processes of Ray write their title over what the system shows of their environment.
    """

    variable = "KVRELAY_TEST_MARK"

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._sessions: set[int] = set()

    def look(self) -> list[psutil.Process]:
        """Those that are there now. Sessions are known from an earlier look on."""
        there = list(psutil.process_iter())
        marked = {process for process in there if self._is_marked(process)}
        sessions = {_session_of(process) for process in marked} - {os.getsid(0)}
        self._sessions.update(filter(None, sessions))
        return [p for p in there if p in marked or _session_of(p) in self._sessions]

    def kill(self) -> None:
        """Until none is left."""
        while living := self.look():
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(living, timeout=5)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(self.variable) == self.mark)
        except psutil.Error:  # it has ended, or is somebody else's
            return False


def _session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(process.pid)
    return None
