"""What Ctrl-C and SIGTERM do before and after a server runs, which handles them itself."""

from __future__ import annotations

import signal
import sys
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_on_stop_signals(status: int) -> None:
    """The first one ends the process, in order and with this status; more change nothing."""

    def end(_number: int, _frame: FrameType | None) -> None:
        ignore_stop_signals()
        sys.exit(status)

    for number in _STOP_SIGNALS:
        signal.signal(number, end)


def ignore_stop_signals() -> None:
    """The process is about to end by itself, and an interrupted end would print a traceback."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
