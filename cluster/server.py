"""A cluster on this machine behind a gateway, on a socket, until somebody says stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator

from cluster.config import GIB, LocalConfig
from cluster.http_server import answer_http
from cluster.joined_cluster import JoinedCluster
from cluster.local import LocalCluster
from cluster.node_compute import RunnerFactory
from cluster.processes import ProcessCluster
from engine import KVCacheConfig
from engine.weights import ModelFiles
from gateway import GatewayConfig, ServedModel
from protocol import ConfigError, Role

Cluster = LocalCluster | ProcessCluster
Servable = Cluster | JoinedCluster


async def serve(
    cluster: Servable,
    model: ServedModel,
    listener: socket.socket,
    gateway: GatewayConfig,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM. Requests under way then end with an error that says so.

    At the second signal, node processes that have not stopped by then are killed.

    Raises:
        ConfigError, ModelError, NodeLost: a node in a process of its own cannot start.
    """
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set() and isinstance(cluster, ProcessCluster):
            cluster.hurry()
        stopping.set()

    with _signals_call(stop):
        if not await _start(cluster, stopping):
            return
        try:
            await answer_http(cluster.dispatcher, model, listener, gateway, stopping, on_ready)
        finally:
            await cluster.stop()


async def _start(cluster: Servable, stopping: asyncio.Event) -> bool:
    """Whether the cluster has started; if it is to stop before that, nothing is left of it."""
    starting = asyncio.create_task(cluster.start())
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
    if starting.cancelled():
        return False
    await starting
    return True


@contextlib.contextmanager
def _signals_call(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def make_cluster(files: ModelFiles, config: LocalConfig, token: str | None = None) -> Cluster:
    """A cluster that computes with torch. `token`: of the cluster; None: one of its own.

    Raises:
        ConfigError: the pools are larger than this machine's memory.
        ConfigError, ModelError: as `torch_compute` does, if the nodes are in this process.
    """
    # What is wrong with the settings is told before torch loads.
    pools = {role: config.kv_cache(files.config, role) for role in config.num_nodes}
    for role, pool in pools.items():
        config.scheduler_config(role, files.config, pool.num_blocks - 1)
    _check_memory(config, pools)
    if config.processes:
        return ProcessCluster(config, files, token=token)
    return LocalCluster(config, files, _compute(files, config), token=token)


def _check_memory(config: LocalConfig, pools: dict[Role, KVCacheConfig]) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes: Counter[int] = Counter()
    for role, pool in pools.items():
        if pool.device == "cpu":
            sizes[pool.num_bytes] += config.num_nodes[role]
    if sum(size * count for size, count in sizes.items()) > memory_bytes:
        nodes = " + ".join(f"{count} x {size / GIB:.1f} GiB" for size, count in sizes.items())
        raise ConfigError(
            "kv_memory_bytes",
            f"{nodes}, one for each node, are more than the {memory_bytes / GIB:.1f} GiB of this "
            "machine",
        )


def _compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    from cluster.torch_compute import torch_compute  # takes seconds, and errors come first

    return torch_compute(files, config)
