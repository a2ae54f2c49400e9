"""A gateway on a socket, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from cluster.config import LocalConfig, ServeConfig
from engine.weights import ModelFiles
from gateway import ChatTemplate, GatewayConfig, ServedModel, Tokenizer, create_app
from protocol import Backend, ConfigError
from telemetry import Metrics

logger = logging.getLogger(__name__)

_GRACE_S = 2  # for open connections, once their requests are aborted
_SPEAK_S = 0.5  # for a connection that was just made to ask for what it wants


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


async def answer_http(
    backend: Backend,
    model: ServedModel,
    listener: socket.socket,
    config: GatewayConfig,
    stopping: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
    leaving: asyncio.Event | None = None,
) -> None:
    """Serve until `stopping` is set. Requests under way then end with an error that says so.

    With `leaving` set, others have to take what is new; it returns when all has been answered.
    """
    app = create_app(config, backend=backend, model=model, metrics=Metrics())
    settings = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    server = _Server(settings, on_ready)

    async def stop() -> None:
        await stopping.wait()
        logger.info("stopping")
        app.state.live_requests.abort()
        server.should_exit = True
        if settings.timeout_graceful_shutdown is None:  # it has been leaving
            await asyncio.sleep(_GRACE_S)
            server.force_exit = True

    async def leave(told: asyncio.Event) -> None:
        await told.wait()
        logger.info("leaving")
        await _stop_listening(server, listener)
        await asyncio.sleep(_SPEAK_S)
        settings.timeout_graceful_shutdown = None  # until all are answered, or `stopping`
        server.should_exit = True

    tasks = [asyncio.create_task(stop())]
    if leaving is not None:
        tasks.append(asyncio.create_task(leave(leaving)))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()


async def _stop_listening(server: uvicorn.Server, listener: socket.socket) -> None:
    """Between two steps of the event loop, so that whoever has been let in is not shut out."""
    while select.select([listener], [], [], 0)[0]:  # noqa: ASYNC110 - the loop lets them in
        await asyncio.sleep(0)
    for listening in server.servers:
        listening.close()


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


def bind(config: ServeConfig, *, shared: bool = False) -> socket.socket:
    """The socket to listen on. Done first, because loading a model for nothing takes longer.

    `shared`: other processes of ours may listen there, too; the kernel spreads connections.

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
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
        # Now, because two servers may bind the same port, and the second one fails only here.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _bind_error(config, error) from error
    return listener


def url_of(host: str, port: int) -> str:
    """The base of the OpenAI interface there."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _bind_error(config: ServeConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            "port", f"{config.port} is in use on {config.host}; choose another one with --port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError("host", f"{config.host!r} is not an address of this machine")
    return ConfigError("port", f"cannot listen on {config.host}:{config.port}: {error.strerror}")
