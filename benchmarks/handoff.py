"""What disaggregation costs and gains on one machine, with the real model.

    python benchmarks/handoff.py [--json]

For prompts of 128, 512 and 1,500 tokens: the time to first token of a disaggregated cluster against
a unified one, in turns; and the part of the transfer that computing did not hide, against TTFT.
"""

import asyncio
import statistics

from benchmarks._clusters import both_topologies, submit
from benchmarks._result import Result, report
from cluster import LocalCluster
from protocol import Timeline

LENGTHS = (128, 512, 1500)
REPEATS = 5
OUTPUT_TOKENS = 8


async def generate(cluster: LocalCluster, length: int) -> Timeline:
    stream = await submit(cluster, length, OUTPUT_TOKENS)
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


async def main() -> None:
    async with both_topologies() as (split, unified):
        for length in LENGTHS:
            report(await measure(split, unified, length))


if __name__ == "__main__":
    asyncio.run(main())
