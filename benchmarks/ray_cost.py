"""What a cluster on Ray costs beyond one in a single process, without a model.

    python benchmarks/ray_cost.py [--json]

One prefill and one decode node whose steps take 20 ms and no CPU, in this process and as actors on
a Ray of their own, in turns:

    cpu_per_step     CPU of all processes for each node and step with 64 requests under way, less
                     what the same processes use when nothing is under way
    idle             CPU of all processes when nothing is under way, per second
    ttft             time to first token of one request at a time, over HTTP, steps of no time

The extra CPU is that of the connection between gateway and node, of the directory and of Ray.
"""

import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil

from benchmarks._clusters import model_files, submit
from benchmarks._result import Result, report
from benchmarks._simulated import instant_compute, simulated_compute
from cluster import LocalCluster, LocalConfig, ServeConfig
from cluster.autoscaling_config import AutoscalingConfig
from cluster.directory_config import DirectoryConfig
from cluster.free_port import free_port
from cluster.http_server import answer_http, bind, served_model
from cluster.joined_cluster import JoinedCluster
from cluster.ray_config import GatewayReplicas, NodeResources, RayConfig
from cluster.ray_mode.connect_directory import follow_directory
from cluster.ray_mode.local_ray import KnownCluster, start_ray, stop_ray
from cluster.ray_mode.ray_cluster import RayCluster
from cluster.ray_mode.spec import Spec
from cluster.secret import Secret
from gateway import GatewayConfig
from kv_transfer.peering import ClusterToken
from protocol import Role
from router import Dispatcher
from scheduler import SchedulerKnobs

CONCURRENCY = 64
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 256
SECONDS = 8.0  # of each measurement
ROUNDS = 5
REQUESTS = 40  # of each measurement of TTFT
CONFIG = LocalConfig(
    max_model_len=2048,
    scheduler=SchedulerKnobs(max_num_seqs=CONCURRENCY),
)
PROCESSES = LocalConfig(**{**vars(CONFIG), "processes": True})

Seconds = float
NumSteps = Callable[[], Awaitable[int]]


async def load(dispatcher: Dispatcher) -> None:
    """One request after the other, until cancelled."""
    while True:
        stream = await submit(dispatcher, PROMPT_TOKENS, OUTPUT_TOKENS)
        async for _ in stream:
            pass


def cpu_s(pid_of_ray: int | None) -> Seconds:
    """Of this process, and of all of Ray and its actors."""
    mine = psutil.Process().cpu_times()
    total = mine.user + mine.system
    if pid_of_ray is None:
        return total
    leader = psutil.Process(pid_of_ray)
    for process in [leader, *leader.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


async def num_steps(dispatcher: Dispatcher) -> int:
    reports = (await dispatcher.status()).nodes
    return sum(its.status.num_steps for its in reports if its.status is not None)


async def measure(dispatcher: Dispatcher, pid_of_ray: int | None) -> tuple[Seconds, Seconds]:
    """CPU for each node and step under load, and per second without."""
    before = cpu_s(pid_of_ray)
    await asyncio.sleep(SECONDS)
    idle = (cpu_s(pid_of_ray) - before) / SECONDS
    clients = [asyncio.create_task(load(dispatcher)) for _ in range(CONCURRENCY)]
    await asyncio.sleep(SECONDS / 4)  # until it is steady
    steps, before, began = await num_steps(dispatcher), cpu_s(pid_of_ray), time.monotonic()
    await asyncio.sleep(SECONDS)
    used = cpu_s(pid_of_ray) - before - idle * (time.monotonic() - began)
    steps = await num_steps(dispatcher) - steps
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return used / steps, idle


async def ttft_s(port: int) -> Seconds:
    """Median over requests of one output token, with prompts that nobody has cached."""
    taken = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for number in range(REQUESTS):
            prompt = [(number * 7919 + i * 31) % 40_000 + 100 for i in range(PROMPT_TOKENS)]
            body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 4, "stream": True}
            began = time.perf_counter()
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                lines = response.aiter_lines()
                await anext(lines)
                taken.append(time.perf_counter() - began)
                async for _ in lines:
                    pass  # its end, so that the next one is alone
    return statistics.median(taken)


@asynccontextmanager
async def local(compute: str) -> AsyncIterator[tuple[LocalCluster, int]]:
    """In this process, with a gateway."""
    files = model_files()
    make = simulated_compute if compute == "simulated_compute" else instant_compute
    cluster = LocalCluster(CONFIG, files, make(files, CONFIG))
    await cluster.start()
    port = free_port("127.0.0.1")
    listener = bind(ServeConfig(port=port, cache_dir=Path(), model=files.name))
    stopping, ready = asyncio.Event(), asyncio.Event()
    model = served_model(files, CONFIG)
    serving = asyncio.create_task(
        answer_http(cluster.dispatcher, model, listener, GatewayConfig(), stopping, ready.set)
    )
    await ready.wait()
    yield cluster, port
    stopping.set()
    await serving
    await cluster.stop()


def spec_of(compute: str, port: int, ray: KnownCluster) -> Spec:
    files = model_files()
    return Spec(
        name=f"cost-{os.getpid()}-{compute.partition('_')[0]}",
        config=PROCESSES,
        serve=ServeConfig(
            port=port, cache_dir=Path.home() / ".cache" / "kvrelay", model="smollm2-135m"
        ),
        fingerprint=files.fingerprint,
        ray=RayConfig(address=ray.address),
        resources={role: NodeResources() for role in Role},
        gateways=GatewayReplicas(count=1),
        gateway=GatewayConfig(),
        directory=DirectoryConfig(),
        autoscaling=AutoscalingConfig(),
        token=Secret("the token of this benchmark"),
        compute=f"benchmarks._simulated:{compute}",
        module_path=tuple(sys.path),
        log_level=logging.WARNING,
    )


@asynccontextmanager
async def on_ray(compute: str, ray: KnownCluster) -> AsyncIterator[tuple[JoinedCluster, int]]:
    """As actors, with a gateway on Ray, and what one more gateway in this process sees of it."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port("127.0.0.1")
        spec = spec_of(compute, port, ray)
        up = partial(RayCluster.up, spec, Path(folder), lambda stage: None)
        cluster = await asyncio.to_thread(up)
        from cluster.ray_mode.memory import MemoryStore  # Ray is imported once it has its token

        memory = MemoryStore(spec.name).load()
        assert memory is not None
        joined = JoinedCluster(
            partial(follow_directory, spec, memory.directory, need_server=True),
            spec.fingerprint,
            ClusterToken(spec.token.value),
            spec.config.routing,
        )
        await joined.start()
        yield joined, port
        await joined.stop()
        await asyncio.to_thread(cluster.down)


async def measure_cpu(ray: KnownCluster) -> list[Result]:
    here, there = [], []
    compute = "simulated_compute"
    async with local(compute) as (cluster, _), on_ray(compute, ray) as (joined, _):
        for _ in range(ROUNDS):
            here.append(await measure(cluster.dispatcher, None))
            there.append(await measure(joined.dispatcher, ray.pid))
    own, rays = _medians(here), _medians(there)
    return [
        Result("cpu_per_step", 1e3 * rays[0], "ms", 1e3 * own[0], "in one process"),
        Result("cpu_per_step_extra", 1e3 * (rays[0] - own[0]), "ms", 0.3, "the limit"),
        Result("idle", 1e3 * rays[1], "ms/s", 1e3 * own[1], "in one process"),
    ]


async def measure_ttft(ray: KnownCluster) -> list[Result]:
    here, there = [], []
    compute = "instant_compute"
    async with local(compute) as (_, port), on_ray(compute, ray) as (_, other):
        for _ in range(ROUNDS):
            here.append(await ttft_s(port))
            there.append(await ttft_s(other))
    own, rays = statistics.median(here), statistics.median(there)
    return [
        Result("ttft", 1e3 * rays, "ms", 1e3 * own, "in one process"),
        Result("ttft_extra", 1e3 * (rays - own), "ms", 10.0, "the limit"),
    ]


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    firsts, seconds = zip(*pairs, strict=True)
    return statistics.median(firsts), statistics.median(seconds)


def main() -> None:
    ray = start_ray("cost", RayConfig(), num_cpus=16)
    try:
        report(asyncio.run(measure_cpu(ray)))
        report(asyncio.run(measure_ttft(ray)))
    finally:
        stop_ray(ray)


if __name__ == "__main__":
    main()
