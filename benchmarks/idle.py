"""What a node costs that has nothing to do.

    python benchmarks/idle.py [--json]

The CPU time of each process of a cluster over ten seconds, after it has served a request, against
the same time of one core.
"""

import asyncio

import psutil

from benchmarks._clusters import model_files, submit
from benchmarks._result import Result, report
from cluster import LocalConfig, ProcessCluster, TransferConfig, TransportChoice

SECONDS = 10.0
SETTLE_S = 2.0


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def measure(transport: TransportChoice) -> list[Result]:
    config = LocalConfig(processes=True, transfer=TransferConfig(transport=transport))
    cluster = ProcessCluster(config, model_files())
    await cluster.start()
    async for _ in await submit(cluster.dispatcher, 64, 8):
        pass
    await asyncio.sleep(SETTLE_S)
    pids = {node.info.node_id: node.pid for node in cluster.nodes}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(SECONDS)
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    await cluster.stop()
    return [
        Result(f"idle_{transport}_{name}", seconds, "s", SECONDS, "one core")
        for name, seconds in used.items()
    ]


async def main() -> None:
    for transport in (TransportChoice.SHM, TransportChoice.NIXL):
        report(await measure(transport))


if __name__ == "__main__":
    asyncio.run(main())
