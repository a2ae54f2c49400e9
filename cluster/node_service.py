"""A node that others may call: listens, and serves whoever knows the cluster's token.

socket ─► stranger ─ handshake ─► connection ─ calls, streams, pings ─► its end
             └─► refused, and told why         and what its callers had is freed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import cast

import msgspec

from cluster.channel import Channel
from cluster.frame_stream import FrameStream
from cluster.keepalive import keep_alive
from cluster.node_endpoints import about_bind, joined, media_to_listen, unique_name
from cluster.node_handshake import (
    NodeRefused,
    RefusalReason,
    Wanted,
    admit,
    envelopes_of_handshake,
    refuse,
)
from cluster.node_messages import Ping, ToService, envelopes_to_service
from cluster.served_connection import ServedConnection, ServedNode
from cluster.service_config import ServiceConfig
from kv_transfer import BadMessage, PeerRefused
from kv_transfer.peering import ClusterToken, Medium
from protocol import ConfigError, NodeInfo, NodeLost, Role

logger = logging.getLogger(__name__)

_DEFAULTS = ServiceConfig()


class NodeService:
    """Of one node, in one event loop. It neither starts nor stops the node."""

    def __init__(
        self,
        node: ServedNode,
        token: ClusterToken,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        config: ServiceConfig = _DEFAULTS,
        on_new_info: Callable[[NodeInfo], None] = lambda info: None,
    ) -> None:
        """`bind` is a numeric address, and `advertise` the one that others dial, if another.

        `on_new_info` is told what to register from now on, when the role has changed.

        Raises:
            ConfigError: no such address, or an address of all networks that nobody can dial.
        """
        self._node = node
        self._known = node.info
        self._token = token
        self._config = config
        self._on_new_info = on_new_info
        self._media = media_to_listen(bind, port, advertise)
        self._endpoints: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._callers: dict[asyncio.Task[None], ServedConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # of both, and of those that have gone

    @property
    def endpoint(self) -> str:
        """Where it listens, once started."""
        return joined(self._endpoints)

    @property
    def info(self) -> NodeInfo:
        """Of the node as it is now, with the endpoint: what others have to know to connect."""
        return msgspec.structs.replace(self._node.info, service=self.endpoint)

    async def start(self) -> None:
        """Raises ConfigError: the address cannot be had."""
        name = unique_name(self._node.info.node_id)
        try:
            for medium in self._media:
                listener, endpoint = medium.listen(name)
                self._servers.append(await self._listen(medium, listener))
                self._endpoints.append(endpoint)
        except ConfigError as error:
            await self.stop()
            raise about_bind(error) from error

    async def stop(self) -> None:
        """Returns when no connection is left, and so no job of any caller."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._end_connections()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def change_role(self, role: Role) -> NodeInfo:
        """As the node does; then all connections end, since their node is one of the past.

        Returns what is to be registered now. A caller of the node may ask for the same.
        """
        await self._node.change_role(role)
        self._renew()
        return self.info

    def _renew(self) -> None:
        if self._node.info != self._known:
            self._known = self._node.info
            self._end_connections()
            self._on_new_info(self.info)

    def _end_connections(self) -> None:
        for task in [*self._strangers, *self._callers]:
            task.cancel()

    # ------------------------------------------------------------------ strangers

    async def _listen(self, medium: Medium, listener: socket.socket) -> asyncio.Server:
        loop, take_in = asyncio.get_running_loop(), partial(self._take_in, medium)

        def make_stream() -> FrameStream:
            return FrameStream(take_in)

        if listener.family == socket.AF_UNIX:
            return await loop.create_unix_server(make_stream, sock=listener)
        return await loop.create_server(make_stream, sock=listener)

    def _take_in(self, medium: Medium, stream: FrameStream) -> None:
        if len(self._strangers) >= self._config.max_strangers:
            next(iter(self._strangers)).cancel()
        task = asyncio.create_task(self._meet(medium, stream))
        self._strangers[task] = None
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_end, stream))

    def _on_end(self, stream: FrameStream, task: asyncio.Task[None]) -> None:
        stream.abort()  # if that was not done: the task may have ended unbegun
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        if not task.cancelled() and task.exception() is not None:  # a bug, which costs no other
            logger.error("a connection has failed", exc_info=task.exception())

    async def _meet(self, medium: Medium, stream: FrameStream) -> None:
        """A connection from its first byte to its last."""
        try:
            if await self._lets_in(medium, stream):
                await self._serve(Channel(stream, envelopes_to_service))
        finally:
            await self._close(stream)

    async def _lets_in(self, medium: Medium, stream: FrameStream) -> bool:
        channel = Channel(stream, envelopes_of_handshake)
        end = cast(socket.socket, stream.transport.get_extra_info("socket"))
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                medium.admit(end)
                await admit(channel, self._token, self._check)
        except PeerRefused as error:
            refuse(channel, NodeRefused(RefusalReason.USER, str(error)))
        except (NodeRefused, NodeLost, TimeoutError) as error:
            what = str(error) or "it did not say who it is in time"
            logger.info("%s dropped a connection: %s", self._node.info.node_id, what)
        else:
            return True
        return False

    def _check(self, wanted: Wanted) -> None:
        """Raises NodeRefused."""
        info, limit = self._node.info, self._config.max_connections
        here = (info.node_id, info.generation)
        if (wanted.node_id, wanted.generation) != here or wanted.endpoint not in self._endpoints:
            raise NodeRefused(
                RefusalReason.OTHER_NODE,
                f"this is {info.node_id} of generation {info.generation}, "
                f"not {wanted.node_id} of generation {wanted.generation} at {wanted.endpoint}",
            )
        if len(self._callers) >= limit:
            raise NodeRefused(RefusalReason.FULL, f"{info.node_id} has {limit} callers already")

    # ------------------------------------------------------------------ callers

    async def _serve(self, channel: Channel[ToService]) -> None:
        task = asyncio.current_task()
        assert task is not None
        del self._strangers[task]
        async with asyncio.TaskGroup() as tasks:
            connection = ServedConnection(self._node, channel, tasks, self._renew)
            self._callers[task] = connection
            watching = tasks.create_task(self._watch(channel))
            try:
                await self._hear(channel, connection)
            finally:
                watching.cancel()
                del self._callers[task]
                await connection.end()
                await self._free_jobs_of(connection.deaf)

    async def _hear(self, channel: Channel[ToService], connection: ServedConnection) -> None:
        try:
            while (message := await channel.receive()) is not None:
                if not isinstance(message, Ping):
                    await connection.take(message)
        except BadMessage as error:
            logger.warning("%s ends a connection: %s", self._node.info.node_id, error)

    async def _watch(self, channel: Channel[ToService]) -> None:
        why = await keep_alive(channel, self._config.keepalive)
        logger.warning("%s ends a connection: %s", self._node.info.node_id, why)
        channel.abort()

    async def _free_jobs_of(self, callers: set[str]) -> None:
        """They have gone without ever having read; unless they are here by another connection."""
        listening = {name for other in self._callers.values() for name in other.listeners}
        for caller in callers - listening:
            with contextlib.suppress(TimeoutError, StopAsyncIteration):
                async with asyncio.timeout(0):  # whoever stops to read is known to have gone
                    await anext(self._node.outputs(caller))

    async def _close(self, stream: FrameStream) -> None:
        try:
            async with asyncio.timeout(self._config.linger_s):
                await stream.close()
        except TimeoutError:
            stream.abort()
