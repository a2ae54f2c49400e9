"""The `kvrelay` command: what has to be settled before the rest is imported."""

from __future__ import annotations

import os

from kvrelay.stop_signals import end_on_stop_signals

_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Until a server takes over, Ctrl-C ends it without a word."""
    end_on_stop_signals(_INTERRUPTED)
    # Threads that spin while they wait for each other lose most of their time as soon as anything
    # else runs on the machine (seen here: steps 3 to 40 times as long; asleep, 1.5 times).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from kvrelay import cli

    cli.main()
