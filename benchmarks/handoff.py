"""What disaggregation costs and gains on one machine, with the real model.

    python benchmarks/handoff.py [--json]

For prompts of 128, 512 and 1,500 tokens: the time to first token of a disaggregated cluster against
a unified one, in turns; and the part of the transfer that computing did not hide, against TTFT.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from pathlib import Path

from _result import Result, report

from cluster import LocalCluster, LocalConfig, Topology
from cluster.torch_compute import torch_compute
from engine.weights import ModelFiles, ModelStore
from protocol import GenerationRequest, SamplingParams, Timeline

LENGTHS = (128, 512, 1500)
REPEATS = 5
OUTPUT_TOKENS = 8
_numbers = itertools.count()


async def generate(cluster: LocalCluster, length: int) -> Timeline:
    """A prompt that nobody has cached."""
    number = next(_numbers)
    prompt = random.Random(number).choices(range(100, 40_000), k=length)
    request = GenerationRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS),
        arrival_time=time.time(),
    )
    stream = await cluster.dispatcher.submit(request)
    async for _ in stream:
        pass
    return stream.timeline


def seconds(values: list[float | None]) -> float:
    """The median of what was reached in every run."""
    reached = [value for value in values if value is not None]
    assert len(reached) == len(values)
    return statistics.median(reached)


async def measure(split: LocalCluster, unified: LocalCluster, length: int) -> list[Result]:
    await generate(split, length)
    await generate(unified, length)
    runs = [
        (await generate(split, length), await generate(unified, length)) for _ in range(REPEATS)
    ]
    ttft = seconds([ours.ttft_s for ours, _ in runs])
    baseline = seconds([other.ttft_s for _, other in runs])
    exposed = seconds([ours.exposed_transfer_s for ours, _ in runs])
    return [
        Result(f"ttft_{length}", ttft, "s", baseline, "unified"),
        Result(f"exposed_transfer_{length}", exposed, "s", ttft, "its TTFT"),
    ]


def make(files: ModelFiles, topology: Topology) -> LocalCluster:
    config = LocalConfig(topology=topology, max_model_len=2048)
    return LocalCluster(config, files, torch_compute(files, config))


async def main() -> None:
    files = ModelStore(Path.home() / ".cache" / "kvrelay").resolve("smollm2-135m")
    split, unified = make(files, Topology.DISAGGREGATED), make(files, Topology.UNIFIED)
    await split.start()
    await unified.start()
    for length in LENGTHS:
        report(await measure(split, unified, length))
    await split.stop()
    await unified.stop()


if __name__ == "__main__":
    asyncio.run(main())
