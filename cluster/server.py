"""A local cluster behind a gateway, on a socket, until somebody says stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from cluster.config import LocalConfig, ServeConfig
from cluster.local import LocalCluster, RunnerFactory
from engine.weights import ModelFiles
from gateway import ChatTemplate, GatewayConfig, ServedModel, Tokenizer, create_app
from protocol import ConfigError
from telemetry import Metrics

logger = logging.getLogger(__name__)

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
    except socket.gaierror as error:
        raise ConfigError("host", f"{config.host!r} is not an address: {error.strerror}") from error
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
    cluster: LocalCluster,
    listener: socket.socket,
    gateway: GatewayConfig,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM. Requests under way then end with an error that says so."""
    app = create_app(
        gateway,
        backend=cluster.dispatcher,
        model=served_model(cluster),
        metrics=Metrics(),
    )
    settings = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    server = _Server(settings, on_ready)

    def stop() -> None:
        logger.info("stopping")
        app.state.live_requests.abort()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    await cluster.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        await cluster.stop()
        for number in signals:
            loop.remove_signal_handler(number)


def served_model(cluster: LocalCluster) -> ServedModel:
    """What the gateway has to know of the model.

    Raises:
        ModelError: its tokenizer or chat template is broken.
    """
    files = cluster.files
    return ServedModel(
        name=files.name,
        max_model_len=cluster.config.model_len(files.config),
        tokenizer=Tokenizer.load(files),
        chat_template=ChatTemplate.load(files),
        created=int(time.time()),
    )


def make_cluster(files: ModelFiles, config: LocalConfig) -> LocalCluster:
    """A cluster that computes with torch.

    Raises:
        ConfigError, ModelError: as `torch_compute` does.
    """
    # What is wrong with the settings is told before torch loads.
    pool = config.kv_cache(files.config)
    config.scheduler(files.config, pool.num_blocks - 1)
    return LocalCluster(config, files, _compute(files, config))


def _compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    from cluster.torch_compute import torch_compute  # takes seconds, and errors come first

    return torch_compute(files, config)
