"""Requests that follow another with the same prompt: its KV is made, and moved, once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from protocol import GenerationRequest, NoHealthyNode, Overloaded, RequestAborted, Role
from tests.router.scripted_nodes import (
    OUTPUT,
    PROMPT,
    ScriptedCluster,
    ScriptedNode,
    make_request,
    until,
)
from tests.router.test_dispatch import Reader, read


def make_follower(request_id: str = "s", **changes: Any) -> GenerationRequest:
    return msgspec.structs.replace(make_request(request_id), follows="r", **changes)


def job_count(cluster: ScriptedCluster) -> int:
    return sum(len(node.jobs) for node in cluster.nodes)


def end_all(*nodes: ScriptedNode) -> None:
    for node in nodes:
        for job in list(node.jobs):
            if node.info.role is Role.PREFILL:
                node.tokens(job=job)
                node.hand_off(job)
            else:
                node.finish(start=0 if job.prefill_endpoint is None else 1, job=job)  # type: ignore[attr-defined]


async def test_it_starts_behind_the_hand_off_on_the_same_nodes() -> None:
    async with ScriptedCluster().running() as cluster:
        first = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        second = await cluster.dispatcher.submit(make_follower())
        readers = [Reader(first), Reader(second)]
        p.tokens()
        await readers[0].has(1)
        assert job_count(cluster) == 2  # the KV is on its way
        p.hand_off()
        d.tokens(start=1)
        await until(lambda: len(d.jobs) == 2)
        assert [job.request.request_id for job in d.jobs] == ["r", "s"]
        end_all(*cluster.prefill, d)
        assert [await reader.task for reader in readers] == [list(OUTPUT)] * 2


async def test_on_a_unified_node_it_starts_behind_the_first_token() -> None:
    async with ScriptedCluster(0, 0, unified=2).running() as cluster:
        first = await cluster.dispatcher.submit(make_request())
        second = await cluster.dispatcher.submit(make_follower())
        (u,) = cluster.holders(cluster.decode)
        u.tokens()
        await until(lambda: len(u.jobs) == 2)
        end_all(u)
        assert await read(first) == await read(second) == list(OUTPUT)


@pytest.mark.parametrize("ends", ["finish", "fail", "close"])
async def test_it_starts_when_the_first_one_ends_however_that_is(ends: str) -> None:
    async with ScriptedCluster(0, 0, unified=1).running() as cluster:
        (u,) = cluster.decode
        first = await cluster.dispatcher.submit(make_request())
        second = await cluster.dispatcher.submit(make_follower())
        assert job_count(cluster) == 1
        if ends == "finish":
            u.finish(start=0)
        elif ends == "fail":
            u.fail(retryable=False)
        else:
            await first.aclose()
        await until(lambda: [job.request.request_id for job in u.jobs] == ["s"])
        end_all(u)
        assert await read(second) == list(OUTPUT)
        await first.aclose()


async def test_it_does_not_wait_for_one_that_is_over_or_unknown() -> None:
    async with ScriptedCluster(0, 0, unified=1).running() as cluster:
        (u,) = cluster.decode
        second = await cluster.dispatcher.submit(make_follower())
        assert u.job.request.request_id == "s"
        end_all(u)
        assert await read(second) == list(OUTPUT)


async def test_without_a_whole_block_there_is_nothing_to_wait_for() -> None:
    async with ScriptedCluster(0, 0, unified=1).running() as cluster:
        (u,) = cluster.decode
        short = PROMPT[:16]  # the last token is computed in any case
        first = await cluster.dispatcher.submit(
            msgspec.structs.replace(make_request(), prompt_token_ids=short)
        )
        second = await cluster.dispatcher.submit(make_follower(prompt_token_ids=short))
        assert len(u.jobs) == 2
        end_all(u)
        assert await read(first) == await read(second) == list(OUTPUT)


async def test_one_whose_client_leaves_meanwhile_never_starts() -> None:
    async with ScriptedCluster(0, 0, unified=1).running() as cluster:
        (u,) = cluster.decode
        first = await cluster.dispatcher.submit(make_request())
        second = await cluster.dispatcher.submit(make_follower())
        await second.aclose()
        with pytest.raises(RequestAborted):
            await read(second)
        end_all(u)
        assert await read(first) == list(OUTPUT)
        await until(lambda: cluster.is_at_rest)
        assert u.jobs == []


async def test_what_nodes_refuse_later_is_told_to_its_client() -> None:
    async with ScriptedCluster(0, 0, unified=1, admission_wait_s=0.0).running() as cluster:
        (u,) = cluster.decode
        first = await cluster.dispatcher.submit(make_request())
        second = await cluster.dispatcher.submit(make_follower())
        u.refuse = Overloaded("full", 1.0)
        u.tokens()
        with pytest.raises(Overloaded, match="full"):
            await read(second)
        u.finish(start=1)
        assert await read(first) == list(OUTPUT)


async def test_the_load_of_all_counts_before_any_says_a_token() -> None:
    async with ScriptedCluster(0, 0, unified=1, max_inflight_requests=2).running() as cluster:
        (u,) = cluster.decode
        first = await cluster.dispatcher.submit(make_request())
        second = await cluster.dispatcher.submit(make_follower())
        with pytest.raises(Overloaded):
            await cluster.dispatcher.submit(make_follower("t"))
        u.tokens()
        await until(lambda: len(u.jobs) == 2)
        end_all(u)
        assert await read(first) == await read(second) == list(OUTPUT)


async def test_the_prompt_that_all_share_is_queued_once() -> None:
    async with ScriptedCluster(0, 0, unified=1, max_queued_tokens=140).running() as cluster:
        (u,) = cluster.decode
        streams = [await cluster.dispatcher.submit(make_request())]
        streams += [await cluster.dispatcher.submit(make_follower(i)) for i in ("s", "t")]
        with pytest.raises(Overloaded):
            await cluster.dispatcher.submit(make_follower("u"))
        u.tokens()
        await until(lambda: len(u.jobs) == 3)
        end_all(u)
        assert [await read(stream) for stream in streams] == [list(OUTPUT)] * 3


async def test_nobody_is_there_any_more_when_it_starts() -> None:
    async with ScriptedCluster(0, 0, unified=1, admission_wait_s=0.0).running() as cluster:
        first = await cluster.dispatcher.submit(make_request())
        second = await cluster.dispatcher.submit(make_follower())
        reading = asyncio.gather(read(first), read(second), return_exceptions=True)
        await cluster.dispatcher.remove_node("u0")
        assert [type(error) for error in await reading] == [NoHealthyNode] * 2
