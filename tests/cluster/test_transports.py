"""Each transport that can be configured, in one process and between processes."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import socket
import time

import psutil
import pytest

from cluster import CacheSize, LocalCluster, TransferConfig, TransportChoice
from protocol import ConfigError, GenerationRequest, SamplingParams
from tests.hash_compute import hash_compute
from tests.hash_model import expected_tokens, hash_files, prompt_of
from tests.process_cluster import at_rest, generate, process_config, running

LENGTHS = (1, 16, 33, 150)
SAMPLING = SamplingParams(max_tokens=10)

needs_nixl = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("nixl_cu12", "nixl_cu13", "nixl"))),
    reason="needs the extra nixl",
)


@pytest.mark.parametrize(
    "choice", [TransportChoice.SHM, pytest.param(TransportChoice.NIXL, marks=needs_nixl)]
)
async def test_between_processes(choice: TransportChoice) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    async with running(process_config(transport=choice)) as cluster:
        assert all(node.info.endpoint.startswith(f"{choice}:") for node in cluster.nodes)
        answers = await asyncio.gather(*(generate(cluster, p, SAMPLING) for p in prompts))
        _, decode = await at_rest(cluster)
    assert answers == [expected_tokens(prompt, SAMPLING) for prompt in prompts]
    assert decode.num_prompt_tokens_loaded == sum(LENGTHS)


@pytest.mark.parametrize("sizes", [(16, 48), (64, 16)], ids=str)
@pytest.mark.parametrize(
    "choice", [TransportChoice.SHM, pytest.param(TransportChoice.NIXL, marks=needs_nixl)]
)
async def test_pools_of_different_sizes(choice: TransportChoice, sizes: tuple[int, int]) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    prefill, decode = (CacheSize(block_size=size, num_blocks=2000 // size) for size in sizes)
    config = dataclasses.replace(
        process_config(transport=choice), prefill_cache=prefill, decode_cache=decode
    )
    async with running(config) as cluster:
        assert [node.info.block_size for node in cluster.nodes] == list(sizes)
        assert [node.info.num_blocks for node in cluster.nodes] == [2000 // size for size in sizes]
        answers = await asyncio.gather(*(generate(cluster, p, SAMPLING) for p in prompts))
        _, status = await at_rest(cluster)
    assert answers == [expected_tokens(prompt, SAMPLING) for prompt in prompts]
    assert status.num_prompt_tokens_loaded == sum(LENGTHS)


@pytest.mark.parametrize(
    "choice",
    [
        TransportChoice.AUTO,
        TransportChoice.MEMORY,
        TransportChoice.SHM,
        pytest.param(TransportChoice.NIXL, marks=needs_nixl),
    ],
)
async def test_within_one(choice: TransportChoice) -> None:
    config = dataclasses.replace(
        process_config(), processes=False, transfer=TransferConfig(transport=choice)
    )
    files = hash_files()
    cluster = LocalCluster(config, files, hash_compute(files, config))
    await cluster.start()
    try:
        answers = [
            [token async for chunk in stream for token in chunk.token_ids]
            for stream in [await cluster.dispatcher.submit(_request(n)) for n in LENGTHS]
        ]
    finally:
        await cluster.stop()
    assert answers == [expected_tokens(prompt_of(length), SAMPLING) for length in LENGTHS]


@needs_nixl
async def test_auto_offers_nixl_to_other_hosts() -> None:
    """Those of this host go on to use shared memory."""
    own = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    if not own:
        pytest.skip("this machine has no address but loopback ones")
    config = dataclasses.replace(process_config(), transfer=TransferConfig(bind=own[0]))
    prompt = prompt_of(70)
    async with running(config) as cluster:
        for node in cluster.nodes:
            near, far = node.info.endpoint.split("+")
            assert near.startswith("shm:")
            assert far.startswith(f"nixl:{own[0]}:")
        assert await generate(cluster, prompt, SAMPLING) == expected_tokens(prompt, SAMPLING)
        _, decode = await at_rest(cluster)
    assert decode.num_prompt_tokens_loaded == len(prompt)


def test_memory_does_not_reach_other_processes() -> None:
    with pytest.raises(ConfigError, match=r"^transport: memory is within one process"):
        process_config(transport=TransportChoice.MEMORY)


def _request(length: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{length}",
        prompt_token_ids=tuple(prompt_of(length)),
        sampling=SAMPLING,
        arrival_time=time.time(),
    )
