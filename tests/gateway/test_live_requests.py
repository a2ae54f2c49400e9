"""Work ends when it is done, when its client leaves and when the server stops, and is awaited."""

import asyncio
import logging

import pytest

from gateway import LiveRequests
from gateway.errors import ClientGone
from protocol import RequestAborted


class Client:
    """The receiving side of an ASGI request whose body has been read."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, object]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Work:
    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cleaned_up = False

    async def run(self) -> None:
        try:
            self.begun.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            self.cleaned_up = True


async def test_the_result_is_handed_on() -> None:
    async def answer() -> int:
        return 42

    live = LiveRequests()
    assert await live.attend(Client().receive, answer()) == 42
    assert len(live) == 0


async def test_a_failure_is_handed_on() -> None:
    async def fail() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await LiveRequests().attend(Client().receive, fail())


async def test_a_client_that_leaves() -> None:
    live, client, work = LiveRequests(), Client(), Work()
    attending = asyncio.create_task(live.attend(client.receive, work.run()))
    await work.begun.wait()
    assert len(live) == 1
    client.left.set()
    with pytest.raises(ClientGone):
        await attending
    assert work.cleaned_up
    assert len(live) == 0


async def test_a_server_that_stops() -> None:
    live, works = LiveRequests(), [Work(), Work()]
    attending = [asyncio.create_task(live.attend(Client().receive, w.run())) for w in works]
    await asyncio.gather(*(work.begun.wait() for work in works))
    live.abort()
    results = await asyncio.gather(*attending, return_exceptions=True)
    assert [type(result) for result in results] == [RequestAborted] * 2
    assert all(work.cleaned_up for work in works)
    late = Work()
    with pytest.raises(RequestAborted):
        await live.attend(Client().receive, late.run())
    assert not late.begun.is_set()


async def test_a_caller_that_is_cancelled() -> None:
    live, work = LiveRequests(), Work()
    attending = asyncio.create_task(live.attend(Client().receive, work.run()))
    await work.begun.wait()
    attending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attending
    assert work.cleaned_up


async def test_a_failure_to_clean_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def messy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise LookupError("left a mess")

    client = Client()
    attending = asyncio.create_task(LiveRequests().attend(client.receive, messy()))
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        client.left.set()
        with pytest.raises(ClientGone):
            await attending
    assert "left a mess" in caplog.text
