"""Merged streams: everything arrives, in order within a source, and nothing runs on afterwards."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from gateway.merge import merge

Item = tuple[str, int]


class Sources:
    """Counts its generators that have been begun and not ended."""

    def __init__(self) -> None:
        self.open = 0

    async def counting(
        self, name: str, length: int, delay_s: float = 0.0, failure: Exception | None = None
    ) -> AsyncGenerator[Item, None]:
        self.open += 1
        try:
            for number in range(length):
                await asyncio.sleep(delay_s)
                yield name, number
            if failure is not None:
                raise failure
        finally:
            await asyncio.sleep(0)
            self.open -= 1


@pytest.mark.parametrize("lengths", [[], [0], [3], [0, 0], [5, 0, 2], [1] * 20])
async def test_everything_arrives_in_order(lengths: list[int]) -> None:
    sources = Sources()
    generators = [
        sources.counting(str(i), length, 0.001 * (i % 3)) for i, length in enumerate(lengths)
    ]
    items = [item async for item in merge(generators)]
    for index, length in enumerate(lengths):
        own = [number for name, number in items if name == str(index)]
        assert own == list(range(length))
    assert sources.open == 0


async def test_a_slow_source_holds_nobody_up() -> None:
    sources = Sources()
    generators = [sources.counting("slow", 2, 0.05), sources.counting("quick", 5)]
    items = [item async for item in merge(generators)]
    assert [name for name, _ in items] == ["quick"] * 5 + ["slow"] * 2


@pytest.mark.parametrize("others", [0, 3])
async def test_a_failure_ends_all(others: int) -> None:
    sources = Sources()
    generators = [sources.counting("bad", 2, failure=LookupError("bad"))]
    generators += [sources.counting(f"{i}", 1000, 0.01) for i in range(others)]
    with pytest.raises(LookupError):
        async for _ in merge(generators):
            pass
    assert sources.open == 0


@pytest.mark.parametrize("num_sources", [1, 2, 5])
@pytest.mark.parametrize("after", [1, 4])
async def test_closing_ends_all(num_sources: int, after: int) -> None:
    sources = Sources()
    generators = [sources.counting(f"{i}", 1000, 0.001) for i in range(num_sources)]
    async with aclosing(merge(generators)) as merged:
        for _ in range(after):
            await anext(merged)
        assert sources.open == num_sources
    assert sources.open == 0


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_cancelling_ends_all(num_sources: int) -> None:
    sources = Sources()
    generators = [sources.counting(f"{i}", 1000, 0.01) for i in range(num_sources)]

    async def consume() -> None:
        async with aclosing(merge(generators)) as merged:
            async for _ in merged:
                pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.03)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sources.open == 0
