from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from engine.outputs import OutputStream
from protocol import Delta, OutputBatch


def batch(number: int) -> OutputBatch:
    return OutputBatch("n", (Delta(request_id="r", attempt=0, position=number),))


def numbers(batches: list[OutputBatch]) -> list[int]:
    return [delta.position for each in batches for delta in each.deltas]


async def read(stream: OutputStream) -> list[OutputBatch]:
    return [each async for each in stream.read()]


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_came_before_the_reader_is_read_first() -> None:
    stream = OutputStream()
    assert stream.put(batch(0))
    assert stream.put(batch(1))
    reading = asyncio.create_task(read(stream))
    await turns()
    assert stream.put(batch(2))
    await turns()
    assert not reading.done()
    stream.close()
    assert numbers(await reading) == [0, 1, 2]


async def test_what_is_there_can_be_read_after_close() -> None:
    stream = OutputStream()
    stream.put(batch(0))
    stream.close()
    stream.close()
    assert not stream.put(batch(1))
    assert numbers(await read(stream)) == [0]
    assert numbers(await read(stream)) == []


async def test_close_wakes_the_reader() -> None:
    stream = OutputStream()
    reading = asyncio.create_task(read(stream))
    await turns()
    stream.close()
    assert await asyncio.wait_for(reading, 5) == []


async def test_a_thread_writes_while_a_loop_reads() -> None:
    """Nothing is lost, nothing comes twice, and the reader never misses its last wake-up."""
    stream = OutputStream(max_batches=100_000)
    total = 20_000

    def write() -> None:
        for number in range(total):
            assert stream.put(batch(number))
        stream.close()

    thread = threading.Thread(target=write)
    thread.start()
    assert numbers(await asyncio.wait_for(read(stream), 20)) == list(range(total))
    thread.join()


async def test_a_reader_that_keeps_up_is_never_too_slow() -> None:
    stream = OutputStream(max_batches=2)
    chunks = stream.read()
    for number in range(50):
        assert stream.put(batch(number))
        assert numbers([await anext(chunks)]) == [number]
    await _close(chunks)


async def test_a_reader_that_is_too_slow_is_told_from_one_that_is_not() -> None:
    stream = OutputStream(max_batches=3)
    assert [stream.put(batch(number)) for number in range(5)] == [True, True, True, False, False]
    chunks = stream.read()
    assert numbers([await anext(chunks)]) == [0]
    assert stream.put(batch(5))
    await _close(chunks)


async def test_a_reader_that_stops_in_the_middle() -> None:
    stream = OutputStream()
    stream.put(batch(0))
    chunks = stream.read()
    await anext(chunks)
    await _close(chunks)
    assert stream.put(batch(1))  # nobody is woken, nothing breaks


def test_a_reader_whose_loop_is_gone() -> None:
    stream = OutputStream()
    stream.put(batch(0))

    async def read_one() -> AsyncIterator[OutputBatch]:
        chunks = stream.read()
        await anext(chunks)
        return chunks

    loop = asyncio.new_event_loop()
    chunks = loop.run_until_complete(read_one())
    loop.close()
    assert not stream.put(batch(1))
    stream.close()
    del chunks


async def _close(chunks: AsyncIterator[OutputBatch]) -> None:
    aclose = getattr(chunks, "aclose")  # noqa: B009
    await aclose()


@pytest.mark.parametrize("num_waiting", [0, 3])
async def test_a_second_reader_after_the_first_has_left(num_waiting: int) -> None:
    stream = OutputStream()
    for number in range(1 + num_waiting):
        stream.put(batch(number))
    first = stream.read()
    assert numbers([await anext(first)]) == [0]
    await _close(first)
    stream.put(batch(9))
    stream.close()
    assert numbers(await read(stream))[-1] == 9
