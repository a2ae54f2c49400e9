"""Prefill, decode and unified nodes in one cluster."""

from __future__ import annotations

import asyncio

import pytest

from cluster import LocalConfig, NodeCores, Topology
from cluster.config import CacheSize
from protocol import ConfigError, Role, SamplingParams
from scheduler import SchedulerKnobs
from tests.hash_cluster import HashCluster
from tests.hash_model import HASH_MODEL, expected_tokens, prompt_of


@pytest.mark.parametrize(
    ("prefill", "decode", "unified"), [(1, 1, 1), (2, 1, 2), (0, 0, 1), (0, 0, 3)]
)
async def test_right_tokens_and_all_nodes_take_part(
    prefill: int, decode: int, unified: int
) -> None:
    sampling = SamplingParams(max_tokens=12)
    prompts = [prompt_of(60 + seed, seed) for seed in range(40)]
    cluster = HashCluster(prefill=prefill, decode=decode, unified=unified, step_s=0.002)
    async with cluster.running():
        answers = await asyncio.gather(*(cluster.generate(p, sampling) for p in prompts))
        statuses = [await node.status() for node in cluster.local.nodes]
    assert answers == [expected_tokens(prompt, sampling) for prompt in prompts]
    assert [status.role for status in statuses] == [
        *[Role.PREFILL] * prefill,
        *[Role.DECODE] * decode,
        *[Role.UNIFIED] * unified,
    ]
    assert all(status.num_generated_tokens for status in statuses)


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [
        ({}, ["prefill-0", "decode-0"]),
        ({"num_unified": 2}, ["prefill-0", "decode-0", "unified-0", "unified-1"]),
        ({"num_prefill": 0, "num_decode": 0, "num_unified": 1}, ["unified-0"]),
        ({"topology": Topology.UNIFIED, "num_decode": 2}, ["unified-0", "unified-1"]),
        ({"topology": Topology.UNIFIED, "num_unified": 2}, ["unified-0", "unified-1"]),
        ({"topology": Topology.UNIFIED, "num_prefill": 0, "num_decode": 0, "num_unified": 1},
         ["unified-0"]),
    ],
    ids=str,
)  # fmt: skip
def test_which_nodes_there_are(settings: dict[str, int], nodes: list[str]) -> None:
    config = LocalConfig(**settings)  # type: ignore[arg-type]
    assert [node_id for _, node_id in config.node_ids] == nodes


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_prefill": 0}, "num_prefill"),
        ({"num_decode": 0}, "num_decode"),
        ({"num_prefill": 0, "num_decode": 0}, "num_prefill"),
        ({"num_unified": -1}, "num_unified"),
        ({"num_decode": 0, "num_unified": 1}, "num_decode"),
        ({"num_prefill": 0, "num_unified": 1}, "num_prefill"),
        ({"num_prefill": -1, "num_decode": 1, "num_unified": 1}, "num_prefill"),
        ({"topology": Topology.UNIFIED, "num_decode": 0}, "num_decode"),
        ({"topology": Topology.UNIFIED, "num_decode": -1, "num_unified": 1}, "num_decode"),
    ],
    ids=str,
)
def test_which_cannot_be(settings: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalConfig(**settings)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_what_is_not_said_of_unified_nodes_is_as_for_decode_nodes() -> None:
    small = CacheSize(num_blocks=50)
    config = LocalConfig(
        num_unified=1,
        processes=True,
        decode_cores=NodeCores(threads=3),
        decode_cache=CacheSize(num_blocks=40),
        decode_scheduler=SchedulerKnobs(max_num_seqs=9),
        max_model_len=512,
    )
    unified = [config.cores(Role.UNIFIED), config.cache_size(Role.UNIFIED)]
    assert unified == [config.decode_cores, config.decode_cache]
    assert config.scheduler_config(Role.UNIFIED, HASH_MODEL, 40).max_num_seqs == 9
    own = LocalConfig(
        num_unified=1,
        processes=True,
        unified_cores=NodeCores(threads=2),
        unified_cache=small,
        unified_scheduler=SchedulerKnobs(max_num_seqs=5),
        max_model_len=512,
    )
    assert [own.cores(Role.UNIFIED).threads, own.cache_size(Role.UNIFIED)] == [2, small]
    assert own.scheduler_config(Role.UNIFIED, HASH_MODEL, 50).max_num_seqs == 5
    assert own.scheduler_config(Role.DECODE, HASH_MODEL, 50).max_num_seqs == 64
