from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from router import RouterConfig
from router.retry_gate import RetryGate


def make(burst: int, *, share: float = 0.0, num_inflight: int = 0) -> RetryGate:
    config = RouterConfig(retry_burst=burst, retry_share=share)
    return RetryGate(config, lambda: num_inflight)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_so_many_are_inside_and_the_first_that_came_is_the_next() -> None:
    gate = make(2)
    entered: list[str] = []

    async def enter(name: str) -> None:
        await gate.enter(name)
        entered.append(name)

    tasks = [asyncio.create_task(enter(name)) for name in "abcd"]
    await settle()
    assert (entered, gate.num_inside, gate.num_waiting) == (["a", "b"], 2, 2)
    gate.leave("b")
    gate.leave("b")  # harmless
    await settle()
    assert entered == ["a", "b", "c"]
    gate.leave("d")  # out of the line: it has ended
    await settle()
    assert (gate.num_inside, gate.num_waiting) == (2, 0)
    await asyncio.gather(*tasks)


async def test_with_many_in_flight_more_may_be_inside() -> None:
    gate = make(2, share=0.5, num_inflight=8)
    for name in "abcd":
        await gate.enter(name)
    waiting = asyncio.create_task(gate.enter("e"))
    await settle()
    assert not waiting.done()
    gate.leave("a")
    await waiting


async def test_whoever_is_cancelled_in_the_line_keeps_nobody_out() -> None:
    gate = make(1)
    await gate.enter("a")
    tasks = [asyncio.create_task(gate.enter(name)) for name in "bc"]
    await settle()
    tasks[0].cancel()
    await settle()
    gate.leave("a")
    await tasks[1]
    assert (gate.num_inside, gate.num_waiting) == (1, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40), st.integers(1, 4))
def test_never_too_many_inside_and_never_one_too_few(
    steps: list[tuple[bool, int]], burst: int
) -> None:
    async def run() -> None:
        gate = make(burst)
        here: dict[int, asyncio.Task[None]] = {}
        for comes, number in steps:
            if comes and number not in here:
                here[number] = asyncio.create_task(gate.enter(str(number)))
            elif not comes and number in here:
                await settle()
                gate.leave(str(number))
                await here.pop(number)
            await settle()
            assert gate.num_inside == min(burst, len(here))
            assert gate.num_inside + gate.num_waiting == len(here)
        for number in list(here):
            gate.leave(str(number))
            await here.pop(number)
        assert gate.num_inside == gate.num_waiting == 0

    asyncio.run(run())
