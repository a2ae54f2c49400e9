"""What a node's engine tells of itself, collected for a reader that may be slow."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from cluster.news import MAX_BATCHES, NewsCollector
from protocol import (
    BlockCounts,
    BlockEventBatch,
    CacheCleared,
    NodeInfo,
    NodeStatus,
    Role,
    TransferCounts,
)

INFO = NodeInfo(
    node_id="decode-0",
    role=Role.DECODE,
    model="m",
    fingerprint="f",
    endpoint="shm:x",
    block_size=16,
    num_blocks=10,
    max_model_len=100,
    max_num_seqs=1,
    max_num_batched_tokens=16,
)
_COUNTS = (
    *("num_running", "num_waiting", "num_skipped_waiting", "num_intake", "queued_tokens"),
    *("num_preemptions", "num_prefix_queries", "num_prefix_hits", "num_prompt_tokens_computed"),
    *("num_prompt_tokens_loaded", "num_prompt_tokens_recomputed", "num_generated_tokens"),
)


def status(num_steps: int) -> NodeStatus:
    return NodeStatus(
        node_id=INFO.node_id,
        role=INFO.role,
        healthy=True,
        draining=False,
        prefill_tokens_per_s=0.0,
        blocks=BlockCounts(total=10, free=10, cached=0, used=0, quarantined=0),
        transfers=TransferCounts(),
        num_steps=num_steps,
        **dict.fromkeys(_COUNTS, 0),  # type: ignore[arg-type]
    )


def batch(sequence: int) -> BlockEventBatch:
    return BlockEventBatch(INFO.node_id, sequence, (CacheCleared(),))


async def test_of_statuses_only_the_newest_is_kept_and_all_events_come_with_it() -> None:
    news = NewsCollector()
    for number in range(1, 6):
        news.on_blocks(INFO, batch(number))
        news.on_status(INFO, status(number))
    taken = await news.take()
    assert taken.status.num_steps == 5
    assert [events.sequence for events in taken.blocks] == [1, 2, 3, 4, 5]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await news.take()


async def test_of_events_the_last_ones_are_kept() -> None:
    news = NewsCollector()
    for number in range(MAX_BATCHES + 3):
        news.on_blocks(INFO, batch(number))
    news.on_status(INFO, status(1))
    taken = await news.take()
    assert len(taken.blocks) == MAX_BATCHES
    assert taken.blocks[-1].sequence == MAX_BATCHES + 2


async def test_from_another_thread_nothing_is_lost() -> None:
    news, last = NewsCollector(), 3000

    def tell() -> None:
        for number in range(1, last + 1):
            news.on_blocks(INFO, batch(number))
            news.on_status(INFO, status(number))

    teller = threading.Thread(target=tell)
    teller.start()
    sequences: list[int] = []
    while not sequences or sequences[-1] < last:
        taken = await news.take()
        sequences += [events.sequence for events in taken.blocks]
        assert taken.status.num_steps <= sequences[-1]
    teller.join()
    assert sequences == list(range(1, last + 1))


def test_when_the_loop_is_closed_nobody_minds() -> None:
    async def make() -> NewsCollector:
        return NewsCollector()

    news = asyncio.run(make())
    news.on_status(INFO, msgspec.structs.replace(status(1), healthy=False))
