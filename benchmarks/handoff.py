"""What handing a request from one node to another costs, with the real model.

    python benchmarks/handoff.py [--json]

Nodes are processes with one core and one thread each: the prefill node has one core, the decode
node the other, and the unified node that they are compared with has the prefill node's. For prompts
of 128, 512 and 2,048 tokens, in turns:

    ttft_N                  time to first token, disaggregated : unified
    exposed_N               commit minus end of prefill (what computing did not hide) : prefill
    exposed_N_layerwise     the same, if each layer of the last chunk goes as soon as it is done
    exposed_2048_throttled  on a link of 100 MB/s : what the last chunk's blocks alone need there
"""

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks._clusters import model_files, submit
from benchmarks._result import Result, report
from cluster import LocalConfig, NodeCores, ProcessCluster, Topology, TransferConfig
from engine import KVCacheConfig
from kv_transfer import FaultPlan
from protocol import Timeline
from scheduler import SchedulerKnobs

LENGTHS = (128, 512, 2048)
REPEATS = 5
OUTPUT_TOKENS = 8
LINK_BYTES_PER_S = 100e6
CHUNK = SchedulerKnobs.max_num_batched_tokens
ONE = NodeCores(threads=1, cpus=(0,))
OTHER = NodeCores(threads=1, cpus=(1,))


@asynccontextmanager
async def started(topology: Topology, transfer: TransferConfig) -> AsyncIterator[ProcessCluster]:
    split = topology is Topology.DISAGGREGATED
    config = LocalConfig(
        topology=topology,
        processes=True,
        prefill_cores=ONE if split else NodeCores(),
        decode_cores=OTHER if split else ONE,
        max_model_len=LENGTHS[-1] + OUTPUT_TOKENS,
        transfer=transfer,
    )
    cluster = ProcessCluster(config, model_files())
    await cluster.start()
    yield cluster
    await cluster.stop()


async def generate(cluster: ProcessCluster, length: int) -> Timeline:
    stream = await submit(cluster.dispatcher, length, OUTPUT_TOKENS)
    async for _ in stream:
        pass
    return stream.timeline


def median(runs: list[Timeline], start: str, end: str) -> float:
    """Seconds between two instants that were reached in every run."""
    spans = [timeline.between(start, end) for timeline in runs]
    reached = [span for span in spans if span is not None]
    assert len(reached) == len(spans), (start, end)
    return statistics.median(reached)


async def in_turns(clusters: list[ProcessCluster], length: int) -> list[list[Timeline]]:
    """The runs of each cluster, after one that does not count."""
    runs: list[list[Timeline]] = [[] for _ in clusters]
    for number in range(REPEATS + 1):
        for cluster, its_runs in zip(clusters, runs, strict=True):
            timeline = await generate(cluster, length)
            if number:
                its_runs.append(timeline)
    return runs


def exposed(name: str, runs: list[Timeline]) -> Result:
    prefill = median(runs, "prefill_started", "prefill_finished")
    seconds = median(runs, "prefill_finished", "committed")
    return Result(name, seconds, "s", prefill, "its prefill")


async def measure(
    split: ProcessCluster, unified: ProcessCluster, layerwise: ProcessCluster, length: int
) -> list[Result]:
    ours, other, by_layers = await in_turns([split, unified, layerwise], length)
    ttft = median(ours, "arrived", "first_token")
    baseline = median(other, "arrived", "first_token")
    step = median(other, "first_token", "last_token") / (OUTPUT_TOKENS - 1)
    return [
        Result(f"ttft_{length}", ttft, "s", baseline, "unified"),
        Result(f"ttft_{length}_limit", ttft, "s", 1.05 * baseline + step, "1.05 unified + 1 step"),
        exposed(f"exposed_{length}", ours),
        exposed(f"exposed_{length}_layerwise", by_layers),
    ]


async def measure_throttled(length: int) -> Result:
    """On a slow link blocks must travel while the next chunk is computed."""
    transfer = TransferConfig(faults=FaultPlan(bytes_per_s=LINK_BYTES_PER_S))
    async with started(Topology.DISAGGREGATED, transfer) as cluster:
        (runs,) = await in_turns([cluster], length)
    model = KVCacheConfig.for_model(model_files().config, num_blocks=2, block_size=CHUNK)
    last_chunk_s = model.bytes_per_block / LINK_BYTES_PER_S
    seconds = median(runs, "prefill_finished", "committed")
    return Result(f"exposed_{length}_throttled", seconds, "s", last_chunk_s, "its last chunk")


async def main() -> None:
    async with AsyncExitStack() as stack:
        split, unified, layerwise = [
            await stack.enter_async_context(started(topology, TransferConfig(layerwise=by_layers)))
            for topology, by_layers in (
                (Topology.DISAGGREGATED, False),
                (Topology.UNIFIED, False),
                (Topology.DISAGGREGATED, True),
            )
        ]
        for length in LENGTHS:
            report(await measure(split, unified, layerwise, length))
    report([await measure_throttled(LENGTHS[-1])])


if __name__ == "__main__":
    asyncio.run(main())
