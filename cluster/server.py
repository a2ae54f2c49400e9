"""A cluster on this machine behind a gateway, on a socket, until somebody says stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import uvicorn

from cluster.config import GIB, LocalConfig, ServeConfig
from cluster.local import LocalCluster
from cluster.node_compute import RunnerFactory
from cluster.processes import ProcessCluster
from engine import KVCacheConfig
from engine.weights import ModelFiles
from gateway import ChatTemplate, GatewayConfig, ServedModel, Tokenizer, create_app
from protocol import ConfigError, Role
from telemetry import Metrics

logger = logging.getLogger(__name__)

Cluster = LocalCluster | ProcessCluster

_GRACE_S = 2  # for open connections, once their requests are aborted


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: it would raise the signal again at the end."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def bind(config: ServeConfig) -> socket.socket:
    """The socket to listen on. Done first, because loading a model for nothing takes longer.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is not one of ours.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:  # the second one for labels such as ""
        reason = getattr(error, "strerror", "not a valid name")
        raise ConfigError("host", f"{config.host!r} is not an address: {reason}") from error
    listener = socket.socket(family, kind, number)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # Now, because two servers may bind the same port, and the second one fails only here.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _bind_error(config, error) from error
    return listener


def _bind_error(config: ServeConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            "port", f"{config.port} is in use on {config.host}; choose another one with --port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError("host", f"{config.host!r} is not an address of this machine")
    return ConfigError("port", f"cannot listen on {config.host}:{config.port}: {error.strerror}")


async def serve(
    cluster: Cluster,
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
            await _answer(cluster, model, listener, gateway, stopping, on_ready)
        finally:
            await cluster.stop()


async def _start(cluster: Cluster, stopping: asyncio.Event) -> bool:
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


async def _answer(
    cluster: Cluster,
    model: ServedModel,
    listener: socket.socket,
    gateway: GatewayConfig,
    stopping: asyncio.Event,
    on_ready: Callable[[], None],
) -> None:
    app = create_app(gateway, backend=cluster.dispatcher, model=model, metrics=Metrics())
    settings = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    server = _Server(settings, on_ready)

    async def stop() -> None:
        await stopping.wait()
        logger.info("stopping")
        app.state.live_requests.abort()
        server.should_exit = True

    stop_task = asyncio.create_task(stop())
    try:
        await server.serve(sockets=[listener])
    finally:
        stop_task.cancel()


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


def served_model(files: ModelFiles, config: LocalConfig) -> ServedModel:
    """What the gateway has to know of the model.

    Raises:
        ConfigError: longer requests are asked for than the model was made for.
        ModelError: its tokenizer or chat template is broken.
    """
    return ServedModel(
        name=files.name,
        max_model_len=config.model_len(files.config),
        tokenizer=Tokenizer.load(files),
        chat_template=ChatTemplate.load(files),
        created=int(time.time()),
    )


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
