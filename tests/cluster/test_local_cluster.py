"""The whole cluster on the hash model: right tokens, whatever the way they take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol import InvalidRequest, PauseMode, PromptTooLong, SamplingParams
from tests.hash_cluster import HashCluster, read, until
from tests.hash_model import LAYERS, expected_tokens, prompt_of

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 300)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"unified": True},
        {"prefill": 2, "decode": 2},
        {"prefix_caching": False},
        {"max_num_batched_tokens": 8},
        {"num_blocks": 40, "max_num_seqs": 4},
    ],
    ids=str,
)
async def test_tokens_are_those_of_an_undisturbed_run(shape: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=20)
    async with HashCluster(**shape).running() as cluster:
        prompts = [prompt_of(length) for length in LENGTHS]
        alone = [await cluster.generate(prompt, sampling) for prompt in prompts]
        together = await asyncio.gather(*(cluster.generate(prompt, sampling) for prompt in prompts))
    expected = [expected_tokens(prompt, sampling) for prompt in prompts]
    assert alone == expected
    assert together == expected


async def test_a_decode_node_computes_no_prompt_token_and_loads_all() -> None:
    async with HashCluster().running() as cluster:
        for length in LENGTHS:
            await cluster.generate(prompt_of(length), SamplingParams(max_tokens=5))
        await cluster.at_rest()
        prefill, decode = [node.host.status() for node in cluster.local.nodes]
    assert decode.num_prompt_tokens_computed == 0
    assert decode.num_prompt_tokens_loaded == sum(LENGTHS)
    assert prefill.num_prompt_tokens_computed == sum(LENGTHS)
    blocks = sum(-(-length // 16) for length in LENGTHS)
    assert prefill.transfers.blocks == blocks
    assert prefill.transfers.bytes == blocks * 16 * 8 * LAYERS
    assert prefill.transfers.committed == decode.transfers.committed == len(LENGTHS)


async def test_only_what_the_decode_node_lacks_travels() -> None:
    shared, sampling = prompt_of(160), SamplingParams(max_tokens=3)
    async with HashCluster().running() as cluster:
        await cluster.generate(shared, sampling)
        await cluster.at_rest()
        before = cluster.local.prefill_nodes[0].host.status().transfers.blocks
        prompt = [*shared, *prompt_of(20, seed=1)]
        assert await cluster.generate(prompt, sampling) == expected_tokens(prompt, sampling)
        await cluster.at_rest()
        after = cluster.local.prefill_nodes[0].host.status().transfers.blocks
    assert after - before == 2  # 20 tokens behind ten whole blocks


async def test_nothing_in_a_pool_counts_but_what_was_pushed() -> None:
    sampling = SamplingParams(max_tokens=16)
    prompts = [prompt_of(length) for length in (1, 16, 33, 150)]
    async with HashCluster(step_s=0.002).running() as cluster:
        prefill, decode = cluster.compute.runners
        decode.pool[:] = 0xDEAD
        streams = [await cluster.submit(prompt, sampling) for prompt in prompts]
        host = cluster.local.decode_nodes[0].host
        await until(lambda: host.status().transfers.committed == len(prompts))
        prefill.pool[:] = 0xBEEF
        answers = await asyncio.gather(*map(read, streams))
    assert answers == [expected_tokens(prompt, sampling) for prompt in prompts]


async def test_hand_offs_under_way_are_shown_to_whoever_asks() -> None:
    """But not with each step, of which most have more important things to tell."""
    async with HashCluster().running() as cluster:
        prefill, decode = cluster.local.nodes
        await decode.pause(PauseMode.KEEP)
        streams = [
            await cluster.submit(prompt_of(50, seed), SamplingParams(max_tokens=4))
            for seed in range(3)
        ]
        await until(lambda: prefill.host.status().num_generated_tokens == 3)
        for node, direction in ((prefill, "push"), (decode, "receive")):
            live = (await node.status()).transfers.live
            assert [(t.direction, t.state) for t in live] == [(direction, "reserving")] * 3
            assert node.host.status().transfers.active == 3
            assert node.host.status().transfers.live == ()
        assert sorted(t.ticket for t in (await prefill.status()).transfers.live) == [
            f"r{number}/0" for number in range(3)
        ]
        await decode.resume()
        for stream in streams:
            await read(stream)
        await cluster.at_rest()
        assert (await decode.status()).transfers.live == ()


async def test_one_token_needs_no_decode_node() -> None:
    async with HashCluster().running() as cluster:
        sampling = SamplingParams(max_tokens=1)
        prompt = prompt_of(50)
        assert await cluster.generate(prompt, sampling) == expected_tokens(prompt, sampling)
        await cluster.at_rest()
        decode = cluster.local.decode_nodes[0].host.status()
        assert decode.transfers.committed == decode.transfers.aborted == 0
        assert cluster.local.prefill_nodes[0].host.status().transfers.blocks == 0


@pytest.mark.parametrize("kind", ["eos", "stop"])
async def test_a_first_token_that_ends_the_request(kind: str) -> None:
    prompt = prompt_of(70)
    first = expected_tokens(prompt, SamplingParams(max_tokens=1))
    ids = {"eos": "eos_token_ids", "stop": "stop_token_ids"}[kind]
    sampling = SamplingParams(max_tokens=30, **{ids: tuple(first)})  # type: ignore[arg-type]
    async with HashCluster().running() as cluster:
        stream = await cluster.submit(prompt, sampling)
        chunks = [chunk async for chunk in stream]
        await cluster.at_rest()
        decode = cluster.local.decode_nodes[0].host.status()
    assert [token for chunk in chunks for token in chunk.token_ids] == first
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].stop_token_id == (first[0] if kind == "stop" else None)
    assert decode.transfers.committed == 0
    assert decode.num_generated_tokens == 0


async def test_a_prompt_that_fits_nowhere_is_refused() -> None:
    async with HashCluster(num_blocks=10).running() as cluster:
        with pytest.raises(PromptTooLong):
            await cluster.submit(prompt_of(161), SamplingParams(max_tokens=2))
        with pytest.raises(PromptTooLong):
            await cluster.submit(prompt_of(512), SamplingParams(max_tokens=2))


@pytest.mark.parametrize("shape", [{}, {"unified": True}])
async def test_more_output_than_there_is_room_for_is_refused(shape: dict[str, bool]) -> None:
    async with HashCluster(num_blocks=10, **shape).running() as cluster:  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"at most 60 "):
            await cluster.submit(prompt_of(100), SamplingParams(max_tokens=90, min_tokens=61))
        fits = SamplingParams(max_tokens=90, min_tokens=60)
        assert len(await cluster.generate(prompt_of(100), fits)) == 60


async def test_preempted_requests_give_the_same_tokens() -> None:
    sampling = SamplingParams(max_tokens=60)
    prompts = [prompt_of(40, seed) for seed in range(6)]
    async with HashCluster(num_blocks=16, max_num_seqs=6).running() as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, sampling) for p in prompts))
        await cluster.at_rest()
        decode = cluster.local.decode_nodes[0].host.status()
    assert answers == [expected_tokens(prompt, sampling) for prompt in prompts]
    assert decode.num_preemptions > 0
    assert decode.num_prompt_tokens_computed == decode.num_prompt_tokens_recomputed
