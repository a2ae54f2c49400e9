from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol import (
    Delta,
    Failure,
    FinishReason,
    GenerationRequest,
    NodeLost,
    RequestAborted,
    RequestFailed,
    Role,
    SamplingParams,
    Timeline,
    TokenChunk,
)
from router import RouterConfig
from router.admission import Admission
from router.flight import Flight
from router.roster import Member
from router.setbacks import Setbacks
from tests.router.scripted_nodes import ScriptedNode


class Tower:
    """The dispatcher's side of flights: counts what is abandoned."""

    def __init__(self, stall_timeout_s: float = 10.0) -> None:
        self.admission = Admission(RouterConfig())
        self.abandoned: list[Flight] = []
        self.may_go = asyncio.Event()
        self.may_go.set()
        self._stall_timeout_s = stall_timeout_s

    def flight(self) -> Flight:
        request = GenerationRequest(
            request_id="r",
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(),
            arrival_time=5.0,
        )
        setbacks = Setbacks(RouterConfig(), random.Random(0))
        lease = self.admission.admit(3)
        return Flight(request, lease, self._abandon, self._stall_timeout_s, setbacks)

    async def _abandon(self, flight: Flight) -> None:
        self.abandoned.append(flight)
        flight.abort()
        await self.may_go.wait()


def delta(
    position: int,
    *token_ids: int,
    finish_reason: FinishReason | None = None,
    stop_token_id: int | None = None,
    num_cached_tokens: int | None = None,
    timeline: Timeline | None = None,
) -> Delta:
    return Delta(
        request_id="r",
        attempt=0,
        position=position,
        token_ids=token_ids,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        num_cached_tokens=num_cached_tokens,
        timeline=timeline,
    )


async def read(flight: Flight) -> list[TokenChunk]:
    return [chunk async for chunk in flight]


async def next_of(chunks: AsyncIterator[TokenChunk]) -> TokenChunk:
    return await anext(chunks)


async def waits(task: asyncio.Task[Any]) -> bool:
    """Whether the task still waits when everything else has had its turn."""
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def test_a_waiting_reader_gets_each_chunk_as_it_comes() -> None:
    flight = Tower().flight()
    chunks = aiter(flight)
    for position in range(3):
        waiting = asyncio.create_task(next_of(chunks))
        assert await waits(waiting)
        flight.take(delta(position, 10 + position))
        assert (await waiting).token_ids == (10 + position,)


async def test_a_slow_reader_gets_all_at_once() -> None:
    flight = Tower().flight()
    for position in range(5):
        flight.take(delta(position, 10 + position))
    end = delta(5, 15, 16, finish_reason=FinishReason.STOP, stop_token_id=16)
    assert flight.take(end)
    assert await read(flight) == [
        TokenChunk(
            token_ids=tuple(range(10, 17)), finish_reason=FinishReason.STOP, stop_token_id=16
        )
    ]


async def test_an_end_without_tokens() -> None:
    flight = Tower().flight()
    flight.take(delta(0, 1))
    chunks = aiter(flight)
    assert (await anext(chunks)).token_ids == (1,)
    flight.take(delta(1, finish_reason=FinishReason.LENGTH))
    assert await anext(chunks) == TokenChunk(token_ids=(), finish_reason=FinishReason.LENGTH)
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)


async def test_an_end_that_comes_too_early_is_no_end_yet() -> None:
    flight = Tower().flight()
    assert not flight.take(delta(1, 2, finish_reason=FinishReason.LENGTH))
    assert not flight.ended
    assert flight.take(delta(0, 1))
    assert [chunk.token_ids for chunk in await read(flight)] == [(1, 2)]


async def test_a_failure_comes_behind_the_tokens() -> None:
    flight = Tower().flight()
    flight.take(delta(0, 1))
    flight.fail(NodeLost("gone"))
    flight.fail(RequestFailed("later"))  # the first one counts
    chunks = aiter(flight)
    assert (await anext(chunks)).token_ids == (1,)
    with pytest.raises(NodeLost, match="gone"):
        await anext(chunks)


async def test_a_failure_wakes_the_reader() -> None:
    flight = Tower().flight()
    reading = asyncio.create_task(read(flight))
    assert await waits(reading)
    flight.fail(NodeLost("gone"))
    with pytest.raises(NodeLost):
        await reading


async def test_leaving_while_somebody_reads() -> None:
    tower = Tower()
    flight = tower.flight()
    reading = asyncio.create_task(read(flight))
    assert await waits(reading)
    await flight.aclose()
    with pytest.raises(RequestAborted, match="request r was cancelled"):
        await reading
    await flight.aclose()
    assert tower.abandoned == [flight]


async def test_leaving_twice_at_the_same_time() -> None:
    tower = Tower()
    flight = tower.flight()
    tower.may_go.clear()
    first = asyncio.create_task(flight.aclose())
    assert await waits(first)
    await flight.aclose()
    tower.may_go.set()
    await first
    assert tower.abandoned == [flight]


async def test_leaving_after_the_end() -> None:
    tower = Tower()
    flight = tower.flight()
    flight.take(delta(0, 1, finish_reason=FinishReason.LENGTH))
    await flight.aclose()
    assert tower.abandoned == []
    assert [chunk.finish_reason for chunk in await read(flight)] == [FinishReason.LENGTH]


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    flight = Tower().flight()
    reading = asyncio.create_task(read(flight))
    assert await waits(reading)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    flight.take(delta(0, 1, finish_reason=FinishReason.LENGTH))
    assert [chunk.token_ids for chunk in await read(flight)] == [(1,)]


async def test_silence_ends_the_request() -> None:
    tower = Tower(stall_timeout_s=0.01)
    flight = tower.flight()
    flight.take(delta(0, 1))
    chunks = aiter(flight)
    assert (await anext(chunks)).token_ids == (1,)
    with pytest.raises(RequestFailed, match=r"no token for 0\.01 s"):
        await anext(chunks)
    assert tower.abandoned == [flight]
    assert flight.ended


async def test_tokens_that_the_client_cannot_see_yet_are_no_silence_breaker() -> None:
    """What comes ahead of its turn must not make the reader hand out an empty chunk."""
    flight = Tower().flight()
    reading = asyncio.create_task(next_of(aiter(flight)))
    flight.take(delta(3, 9))
    assert await waits(reading)
    flight.take(delta(0, 1))
    assert (await reading).token_ids == (1,)


async def test_the_next_attempt_goes_on_behind_what_is_emitted() -> None:
    flight = Tower().flight()
    first = flight.ticket
    flight.open_nodes = {"p0", "d0"}
    flight.take(delta(0, 1))
    flight.take(delta(2, 66))
    flight.next_attempt()
    assert not flight.listens_to(first)
    assert flight.listens_to(flight.ticket)
    assert flight.open_nodes == set()
    flight.take(delta(1, 2))
    assert flight.log.emitted == [1, 2]
    flight.abort()
    assert not flight.listens_to(flight.ticket)


async def test_what_the_first_node_found_in_its_cache_is_what_counts() -> None:
    flight = Tower().flight()
    flight.take(delta(0, 1, num_cached_tokens=32))
    flight.take(delta(1, 2, num_cached_tokens=48))  # D's own
    assert flight.num_cached_tokens == 32


async def test_instants_of_all_nodes_come_together() -> None:
    flight = Tower().flight()
    flight.take(delta(0, 1, timeline=Timeline(prefill_started=6.0)))
    flight.take(delta(1, 2, timeline=Timeline(prefill_started=9.0, reserved=7.0)))
    assert flight.timeline.arrived == 5.0
    assert flight.timeline.prefill_started == 6.0
    assert flight.timeline.reserved == 7.0


# ---------------------------------------------------------------------- who is to blame


def members() -> dict[str, Member]:
    nodes = (ScriptedNode("p0", Role.PREFILL), ScriptedNode("d0", Role.DECODE))
    return {node.info.node_id: Member(node, "caller", 0.0) for node in nodes}


@pytest.mark.parametrize(
    ("reporter", "label", "blamed", "blamed_without_p", "kept"),
    [
        ("p0", "node_lost", {"p0"}, {"p0"}, "d0"),
        ("d0", "node_lost", {"d0"}, {"d0"}, None),
        ("p0", "transfer_failed", {"p0", "d0"}, {"p0"}, "d0"),
        ("d0", "transfer_failed", {"p0", "d0"}, {"p0"}, "d0"),
    ],
)
async def test_who_is_avoided_after_a_failure(
    reporter: str, label: str, blamed: set[str], blamed_without_p: set[str], kept: str | None
) -> None:
    flight, here = Tower().flight(), members()
    flight.begin_attempt(here, "d0")
    flight.blame(here[reporter], Failure(label, "it failed", retryable=True))
    assert flight.blamed(frozenset({"p0", "d0"})) == blamed
    assert flight.blamed(frozenset({"d0"})) == blamed_without_p
    assert flight.decode_node_id == kept
    for node_id in here:
        flight.forgive(node_id)
    assert flight.blamed(frozenset({"p0", "d0"})) == set()
    flight.abort()


async def test_only_the_member_that_has_the_job_is_open() -> None:
    flight, here = Tower().flight(), members()
    flight.begin_attempt(here, "d0")
    assert flight.is_open_at(here["d0"])
    assert not flight.is_open_at(members()["d0"])  # another one of the same id
    assert set(flight.take_open()) == set(here.values())
    assert flight.take_open() == []
    assert not flight.is_open_at(here["d0"])
    flight.abort()
