"""The `kvrelay` command: signals first, because importing the rest takes a moment."""

from __future__ import annotations

from kvrelay.stop_signals import end_on_stop_signals


def main() -> None:
    """Run the command line. Until a server takes over, Ctrl-C ends it without a word."""
    end_on_stop_signals()
    from kvrelay import cli

    cli.main()
