"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all sources as they come, one of each source in hand at most.

    The first failure of a source is raised. When this ends, however it does, all sources have.
    """
    if len(sources) == 1:  # the common case, without a task for each item
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                source = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:  # one whose next step was cancelled before it began has not ended
            await source.aclose()
