"""Several answers to one prompt: it is computed once, and travels once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol import BlockCounts, NodeStatus, Role, SamplingParams
from tests.hash_cluster import HashCluster, read
from tests.hash_model import expected_tokens, prompt_of

LENGTH, NUM_CHOICES = 200, 8
LAST = LENGTH % 16  # tokens that are in no whole block, and are each choice's own


async def answered(cluster: HashCluster) -> list[NodeStatus]:
    """The nodes, after all choices are there and right."""
    prompt, sampling = prompt_of(LENGTH), SamplingParams(max_tokens=8)
    first = await cluster.submit(prompt, sampling)
    others = [
        await cluster.submit(prompt, sampling, follows=first.request_id)
        for _ in range(NUM_CHOICES - 1)
    ]
    answers = await asyncio.gather(*map(read, [first, *others]))
    assert answers == [expected_tokens(prompt, sampling)] * NUM_CHOICES
    await cluster.at_rest()
    return [node.host.status() for node in cluster.local.nodes]


@pytest.mark.parametrize("shape", [{}, {"prefill": 2, "decode": 2}], ids=str)
async def test_the_first_one_s_blocks_travel_and_the_others_share_them(
    shape: dict[str, Any],
) -> None:
    async with HashCluster(num_blocks=256, step_s=0.001, **shape).running() as cluster:
        nodes = await answered(cluster)
    prefill = [node for node in nodes if node.role is Role.PREFILL]
    decode = [node for node in nodes if node.role is Role.DECODE]
    once = LENGTH + (NUM_CHOICES - 1) * LAST
    assert sum(node.num_prompt_tokens_computed for node in prefill) == once
    assert sum(node.num_prompt_tokens_loaded for node in decode) == once
    assert sum(node.num_prompt_tokens_computed for node in decode) == 0
    whole_blocks, each_one_s_last = LENGTH // 16, NUM_CHOICES
    assert sum(node.transfers.blocks for node in prefill) == whole_blocks + each_one_s_last
    # On one pair of nodes, too: so there is no second copy of the blocks.
    assert sum(node.num_steps > 0 and _has_blocks(node.blocks) for node in decode) == 1


def _has_blocks(counts: BlockCounts) -> bool:
    return counts.cached > 0


async def test_on_one_node_the_prompt_is_computed_once() -> None:
    async with HashCluster(unified=True, num_blocks=256, step_s=0.001).running() as cluster:
        (node,) = await answered(cluster)
    assert node.num_prompt_tokens_computed == LENGTH + (NUM_CHOICES - 1) * LAST


async def test_more_than_one_node_has_room_for_go_to_another() -> None:
    cluster = HashCluster(num_blocks=256, step_s=0.002, decode=2, max_num_seqs=4)
    async with cluster.running():
        nodes = await answered(cluster)
    loaded = [node.num_prompt_tokens_loaded for node in nodes if node.role is Role.DECODE]
    assert all(loaded)
