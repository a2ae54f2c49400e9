"""Where tables are printed."""

from __future__ import annotations

import os

from rich.console import Console

_PIPED_WIDTH = 100  # columns, where there is no terminal to ask


def make_console() -> Console:
    """As wide as the terminal; what is piped gets lines that fit on a page."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=_PIPED_WIDTH)
