"""How much a long prompt disturbs a stream that is being decoded.

    python benchmarks/interference.py [--json]

While one request decodes, a prompt of 1,500 tokens arrives. Rows: the gaps between the tokens of
the first request during that prefill, disaggregated against unified, in turns (the median and the
longest); and what it costs, the time to first token of the long prompt.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks._clusters import both_topologies, submit
from benchmarks._result import Result, report
from cluster import LocalCluster

LONG_PROMPT = 1500
REPEATS = 3


@dataclass(frozen=True)
class Disturbance:
    """Seconds; the gaps are those that lie within the long prompt's prefill."""

    gaps: list[float]
    long_ttft: float


async def disturb(cluster: LocalCluster) -> Disturbance:
    steady = await submit(cluster.dispatcher, 32, 1000)
    arrivals: list[float] = []

    async def read_steady() -> None:
        async for _ in steady:
            arrivals.append(time.perf_counter())

    reading = asyncio.create_task(read_steady())
    await asyncio.sleep(1.0)
    began = time.perf_counter()
    long = await submit(cluster.dispatcher, LONG_PROMPT, 1)
    async for _ in long:
        pass
    ended = time.perf_counter()
    await asyncio.sleep(0.5)
    await steady.aclose()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    pairs = itertools.pairwise(arrivals)
    return Disturbance([b - a for a, b in pairs if b > began and a < ended], ended - began)


def compare(
    name: str, runs: list[tuple[Disturbance, Disturbance]], of: Callable[[Disturbance], float]
) -> Result:
    split = statistics.median(of(ours) for ours, _ in runs)
    unified = statistics.median(of(other) for _, other in runs)
    return Result(name, split, "s", unified, "unified")


async def main() -> None:
    async with both_topologies() as (split, unified):
        await disturb(split)
        await disturb(unified)
        runs = [(await disturb(split), await disturb(unified)) for _ in range(REPEATS)]
    report(
        [
            compare("gap_median", runs, lambda run: statistics.median(run.gaps)),
            compare("gap_longest", runs, lambda run: max(run.gaps)),
            compare("long_prompt_ttft", runs, lambda run: run.long_ttft),
        ]
    )


if __name__ == "__main__":
    asyncio.run(main())
