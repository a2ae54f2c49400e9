"""The end of an actor's process."""

from __future__ import annotations

import os
import threading


def end_process(delay_s: float = 0.1) -> None:
    """End it for good, a moment from now: an answer that is under way still arrives.

    An actor that merely lets go of everything would stay, since a process of Ray waits for work.
    """
    timer = threading.Timer(delay_s, os._exit, args=(0,))
    timer.daemon = True
    timer.start()
