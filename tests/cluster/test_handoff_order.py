"""What a hand-off must not do: wait in a circle, make the client wait, or keep what it lost."""

from __future__ import annotations

import asyncio
import time

from kv_transfer import MemoryHub, MemoryTransport, Transport
from protocol import GenerationRequest, SamplingParams
from tests.hash_cluster import HashCluster, read, until
from tests.hash_model import expected_tokens, prompt_of
from tests.slow_transport import Delay, SlowTransport


def slow(delay: Delay, only: str = "") -> object:
    def make(hub: MemoryHub, name: str) -> Transport:
        inner = MemoryTransport(hub, name)
        return SlowTransport(inner, delay) if name.startswith(only) else inner

    return make


async def test_the_first_token_does_not_wait_for_the_commit() -> None:
    def delay(point: str) -> float:
        return 0.5 if point == "Commit" else 0.0

    prompt, sampling = prompt_of(100), SamplingParams(max_tokens=8)
    async with HashCluster(make_transport=slow(delay)).running() as cluster:  # type: ignore[arg-type]
        decode = cluster.local.decode_nodes[0].host
        chunks, committed = [], []
        async for chunk in await cluster.submit(prompt, sampling):
            chunks.append(chunk)
            committed.append(decode.status().transfers.committed)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == expected_tokens(prompt, sampling)
    assert len(chunks[0].token_ids) == 1
    assert committed[:2] == [0, 1]


async def test_two_requests_that_each_hold_what_the_other_waits_for() -> None:
    """P gives up the blocks of a request that D has no room for, and computes them again.

        P   16 blocks   urgent 13: done, waits for blocks of D     late 3: waits for blocks of P
        D   16 blocks   urgent 0                                   late 13: waits for P

    The late request starts first, so D reserves for it; then the urgent one takes its blocks on P.
    """
    sampling = SamplingParams(max_tokens=10)
    late, urgent = prompt_of(200, seed=1), prompt_of(200, seed=2)
    async with HashCluster(
        num_blocks=16,
        max_num_batched_tokens=32,
        step_s=0.01,
        policy="priority",
        reserve_full_isl=False,
        long_prefill_token_threshold=16,
    ).running() as cluster:
        prefill = cluster.local.prefill_nodes[0].host.engine.scheduler
        decode = cluster.local.decode_nodes[0].host
        streams = [await cluster.submit(late, sampling, priority=1)]
        await until(lambda: decode.status().blocks.used > 0)
        streams.append(await cluster.submit(urgent, sampling, priority=0))
        answers = await asyncio.wait_for(asyncio.gather(*map(read, streams)), timeout=30)
    assert answers == [expected_tokens(prompt, sampling) for prompt in (late, urgent)]
    assert prefill.stats.num_preemptions == 1
    assert prefill.stats.num_revoked_pins == 1


async def test_a_prefill_node_goes_on_while_the_decode_node_is_full() -> None:
    sampling = SamplingParams(max_tokens=40)
    prompts = [prompt_of(200, seed) for seed in range(6)]
    async with HashCluster(
        num_blocks=16, max_num_seqs=4, max_num_batched_tokens=32
    ).running() as cluster:
        streams = [await cluster.submit(prompt, sampling) for prompt in prompts]
        answers = await asyncio.wait_for(asyncio.gather(*map(read, streams)), timeout=60)
        await cluster.at_rest()
        prefill = cluster.local.prefill_nodes[0].host.engine.scheduler
    assert answers == [expected_tokens(prompt, sampling) for prompt in prompts]
    assert prefill.stats.num_revoked_pins > 0


async def test_a_late_job_finds_a_prefill_that_has_started() -> None:
    """P's first word may come before D has heard of the request at all."""
    prompt, sampling = prompt_of(50), SamplingParams(max_tokens=6)
    async with HashCluster().running() as cluster:
        decode = cluster.local.decode_nodes[0]
        take, release = decode.decode, asyncio.Event()

        async def take_late(job: object) -> None:
            async def later() -> None:
                await release.wait()
                await take(job)  # type: ignore[arg-type]

            tasks.append(asyncio.create_task(later()))

        tasks: list[asyncio.Task[None]] = []
        decode.decode = take_late  # type: ignore[method-assign]
        stream = await cluster.submit(prompt, sampling)
        chunks = aiter(stream)
        first = await anext(chunks)
        release.set()
        rest = [token async for chunk in chunks for token in chunk.token_ids]
        await asyncio.gather(*tasks)
    assert [*first.token_ids, *rest] == expected_tokens(prompt, sampling)


async def test_a_request_that_only_one_node_knows_is_cleaned_up() -> None:
    """The client leaves before D's job is there: P hears that nobody wants the blocks."""
    async with HashCluster().running() as cluster:
        request = GenerationRequest(
            request_id="alone",
            prompt_token_ids=tuple(prompt_of(60)),
            sampling=SamplingParams(max_tokens=5),
            arrival_time=time.time(),
        )
        stream = await cluster.local.dispatcher.submit(request)
        await cluster.local.decode_nodes[0].cancel("alone")
        await stream.aclose()
