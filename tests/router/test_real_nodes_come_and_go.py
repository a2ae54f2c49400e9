"""Nodes with real schedulers and hand-offs leave and come back; tokens and blocks stay right."""

from __future__ import annotations

import asyncio
import random

import pytest

from protocol import SamplingParams
from router import RouterConfig
from tests.hash_cluster import HashCluster, read
from tests.hash_model import expected_tokens, prompt_of

TIMEOUT_S = 60.0


@pytest.mark.parametrize("seed", range(3))
async def test_tokens_and_blocks_are_right_whoever_comes_and_goes(seed: int) -> None:
    chance = random.Random(seed)
    cluster = HashCluster(
        prefill=2,
        decode=2,
        num_blocks=200,
        step_s=0.001,
        router=RouterConfig(
            default_prefill_tokens_per_s=1e5,
            retry_backoff_s=0.001,
            max_lost_attempts=1000,
            max_attempts=20,  # a hand-off fails as well when an end of it is taken away
            admission_wait_s=TIMEOUT_S,
            recovery_timeout_s=TIMEOUT_S,
        ),
    )
    prompts = [prompt_of(chance.randint(1, 300), chance.randrange(5)) for _ in range(24)]
    samplings = [SamplingParams(max_tokens=chance.randint(1, 60)) for _ in prompts]
    async with cluster.running(), asyncio.timeout(TIMEOUT_S):
        dispatcher = cluster.local.dispatcher

        async def client(index: int) -> list[int]:
            for _ in range(index):  # one after the other
                await asyncio.sleep(0.002)
            return await read(await cluster.submit(prompts[index], samplings[index]))

        clients = [asyncio.create_task(client(index)) for index in range(len(prompts))]
        nodes = [*cluster.local.prefill_nodes, *cluster.local.decode_nodes]
        away = set(range(4))
        for node in nodes:
            await dispatcher.remove_node(node.info.node_id)
        while not all(task.done() for task in clients):
            number = chance.randrange(4)
            if number in away:
                dispatcher.add_node(nodes[number])
                away.discard(number)
            elif chance.random() < 0.4:
                await dispatcher.remove_node(nodes[number].info.node_id)
                away.add(number)
            await asyncio.sleep(chance.choice((0.0, 0.002, 0.02)))
        assert await asyncio.gather(*clients) == [
            expected_tokens(prompt, sampling)
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        status = await dispatcher.status()
        assert sum(status.retries.values()) > 0
        assert status.num_requests == 0
        assert dispatcher._admission.num_inflight == dispatcher._admission.queued_tokens == 0
        assert dispatcher._gate.num_inside == dispatcher._gate.num_waiting == 0
        assert dispatcher._cluster.load.num_attempts == 0
        for number in away:
            dispatcher.add_node(nodes[number])
