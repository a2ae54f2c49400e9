from __future__ import annotations

import asyncio

from router.waiting_room import WaitingRoom
from tests.router.scripted_nodes import until


def later(seconds: float = 10.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_only_what_is_new_wakes() -> None:
    room = WaitingRoom()
    waiting = asyncio.create_task(room.wait("r", "sick", later()))
    await until(lambda: len(room) == 1)
    room.tell("sick")
    await asyncio.sleep(0)
    assert not waiting.done()
    room.tell("well")
    assert await waiting
    assert len(room) == 0


async def test_nothing_new_comes_in_time() -> None:
    assert not await WaitingRoom().wait("r", "sick", later(0.005))


async def test_whoever_has_ended_is_woken() -> None:
    room = WaitingRoom()
    waiting = [asyncio.create_task(room.wait(name, "sick", later())) for name in "ab"]
    await until(lambda: len(room) == 2)
    room.wake("a")
    room.wake("c")
    assert await waiting[0]
    assert len(room) == 1
    room.close()
    assert not await waiting[1]
    assert not await room.wait("d", "sick", later())
