"""A node in a process that is not ours, reached over a connection.

connect_node: dial ─► handshake ─► ConnectedNode ─► calls, streams, pings ─► lost, for a reason
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import msgspec

from cluster.channel import Channel
from cluster.frame_stream import FrameStream
from cluster.keepalive import KeepaliveConfig, keep_alive
from cluster.node_client import NodeClient
from cluster.node_endpoints import Dialler
from cluster.node_handshake import (
    NodeRefused,
    RefusalReason,
    Wanted,
    call_at,
    envelopes_of_handshake,
)
from cluster.node_messages import FromService, Ping, envelopes_from_service
from kv_transfer import BadMessage, PeerUnreachable
from kv_transfer.peering import ClusterToken
from protocol import NodeInfo, NodeLost, Role

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0

_KEEPALIVE = KeepaliveConfig()


class ConnectedNode(NodeClient):
    """Implements `protocol.PrefillNode` or `DecodeNode`, as the role is. Has one event loop.

    It does not connect again: whoever wants that makes another one.
    """

    def __init__(
        self, info: NodeInfo, channel: Channel[FromService], keepalive: KeepaliveConfig
    ) -> None:
        super().__init__(info.node_id)
        self.info = info
        self.loss = ""  # why it is lost
        self.lost = asyncio.Event()
        self._channel = channel
        self._reading = asyncio.create_task(self._read_all(channel))
        self._watching = asyncio.create_task(self._watch(keepalive))

    async def change_role(self, role: Role) -> NodeInfo:
        """This connection ends with the answer: its node is one of the past."""
        info = await super().change_role(role)
        return msgspec.structs.replace(info, service=self.info.service)

    async def wait_lost(self) -> str:
        """Returns why, when the connection has ended."""
        await self.lost.wait()
        return self.loss

    async def close(self) -> None:
        """The node frees whatever its callers have here. Returns when nothing is left."""
        self._end("it was closed")
        await asyncio.wait([self._reading, self._watching])
        await self._channel.close()

    async def _read_all(self, channel: Channel[FromService]) -> None:
        try:
            await channel.receive_all(self._hear)
            self._end("it closed the connection")
        except BadMessage as error:
            self._end(str(error))
        finally:
            self._watching.cancel()
            self._lose()
            self.lost.set()

    def _hear(self, message: FromService) -> None:
        if not isinstance(message, Ping):
            self._take(message)

    async def _watch(self, keepalive: KeepaliveConfig) -> None:
        self._end(await keep_alive(self._channel, keepalive))

    def _end(self, why: str) -> None:
        """The reader does the rest. The first reason is the one that counts."""
        if not self.loss:
            self.loss = why
            logger.info("the connection to node %s ends: %s", self.node_id, why)
        self._channel.abort()

    def _loss(self) -> NodeLost:
        return NodeLost(f"node {self.node_id} is down: {self.loss}")


async def connect_node(
    info: NodeInfo,
    token: ClusterToken,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    keepalive: KeepaliveConfig = _KEEPALIVE,
) -> ConnectedNode:
    """Over the first endpoint of `info.service` that leads there.

    Raises:
        NodeLost: nobody is there, nobody answers in time, or no endpoint leads there from here.
        NodeRefused: somebody is there, but it is another node, or it does not speak with us.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return ConnectedNode(info, await _reach(info, token), keepalive)
    except TimeoutError as error:
        raise NodeLost(f"node {info.node_id} did not answer within {timeout_s:g} s") from error


async def _reach(info: NodeInfo, token: ClusterToken) -> Channel[FromService]:
    dialler, failures = Dialler(), list[str]()
    try:
        for endpoint in dialler.split(info.service):
            try:
                return await _greet(await dialler.connect(endpoint), token, _wanted(info, endpoint))
            except NodeRefused as error:
                if error.reason is not RefusalReason.USER:
                    raise NodeRefused(error.reason, f"node {info.node_id}: {error}") from error
                failures.append(str(error))
            except (PeerUnreachable, NodeLost) as error:
                failures.append(str(error))
    except PeerUnreachable as error:
        failures.append(str(error))
    raise NodeLost(f"node {info.node_id} cannot be reached: {'; '.join(failures)}")


def _wanted(info: NodeInfo, endpoint: str) -> Wanted:
    return Wanted(endpoint, info.node_id, info.generation)


async def _greet(
    connection: socket.socket, token: ClusterToken, wanted: Wanted
) -> Channel[FromService]:
    stream = await FrameStream.open(connection)
    async with contextlib.AsyncExitStack() as on_failure:
        channel = Channel(stream, envelopes_of_handshake)
        on_failure.push_async_callback(channel.close)
        on_failure.callback(channel.abort)
        await call_at(channel, token, wanted)
        on_failure.pop_all()
    return Channel(stream, envelopes_from_service)
