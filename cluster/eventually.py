"""Waiting for what nobody tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def eventually(
    condition: Callable[[], bool], *, within_s: float, every_s: float = 0.02
) -> bool:
    """Look again and again; whether it has come true in time."""
    until = time.monotonic() + within_s
    while not (is_so := condition()) and time.monotonic() < until:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(every_s)
    return is_so
