"""A sampled answer whose decode node is lost goes on as if nothing had been."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from cluster import LocalCluster, LocalConfig
from engine.weights import ModelStore
from protocol import GenerationRequest, SamplingParams, TokenLogprobs
from tests.e2e.reference_cluster import serving_pools

NUM_TOKENS = 120  # so that the reader is not the last to know that all are there
PROMPT = tuple(range(100, 150))
SAMPLINGS = {
    "temperature": SamplingParams(seed=5, max_tokens=NUM_TOKENS),
    "filters": SamplingParams(seed=6, top_p=0.8, top_k=40, min_p=0.02, max_tokens=NUM_TOKENS),
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.7, max_tokens=NUM_TOKENS),
    "frequency": SamplingParams(
        seed=7, temperature=0.5, frequency_penalty=1.5, max_tokens=NUM_TOKENS
    ),
    "presence": SamplingParams(temperature=0, presence_penalty=2.0, max_tokens=NUM_TOKENS),
    "min_tokens": SamplingParams(
        seed=8,
        min_tokens=NUM_TOKENS - 2,
        stop_token_ids=tuple(range(40)),
        logit_bias=((300, 3.0),),
        max_tokens=NUM_TOKENS,
    ),
}


class Answer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []

    async def read(
        self, cluster: LocalCluster, sampling: SamplingParams, lose_decode_after: int | None = None
    ) -> Answer:
        """`lose_decode_after` so many tokens nobody talks with the decode node any more."""
        request = GenerationRequest(
            request_id=f"r{time.monotonic_ns()}",
            prompt_token_ids=PROMPT,
            sampling=sampling,
            arrival_time=time.time(),
        )
        stream = await cluster.dispatcher.submit(request)
        async for chunk in stream:
            assert len(chunk.logprobs) == len(chunk.token_ids)
            self.tokens += chunk.token_ids
            self.logprobs += chunk.logprobs
            if lose_decode_after is not None and len(self.tokens) >= lose_decode_after:
                lose_decode_after = None
                await _lose_decode_node(cluster)
        return self


async def _lose_decode_node(cluster: LocalCluster) -> None:
    busy = [node for node in cluster.decode_nodes if node.host.jobs]
    assert len(busy) == 1
    await cluster.dispatcher.remove_node(busy[0].info.node_id)


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_tokens_and_their_logprobs_are_the_same(tiny_model: Path, name: str) -> None:
    files = ModelStore(tiny_model.parent).resolve(str(tiny_model))
    told = msgspec.structs.replace(SAMPLINGS[name], logprobs=2)
    config = LocalConfig(num_prefill=1, num_decode=2, num_blocks=200, max_model_len=512)
    async with serving_pools(files, config) as (cluster, _):
        expected = await Answer().read(cluster, told)
        actual = await Answer().read(cluster, told, lose_decode_after=7)
        status = await cluster.dispatcher.status()
    assert sum(status.retries.values()) >= 1
    assert actual.tokens == expected.tokens
    assert len(actual.tokens) >= NUM_TOKENS - 2
    for one, other in zip(actual.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-3)
