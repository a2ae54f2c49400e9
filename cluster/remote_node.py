"""A node in a process of its own, as the process that started it sees it.

launch ─► Setup ─► Built: `info` is known ─► start ─► calls, streams, news ─► stop
                                                        └─► the process has died: NodeLost
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from cluster.channel import Channel
from cluster.child_process import ChildProcess, describe_exit
from cluster.node_client import ANSWER_TIMEOUT_S, NodeClient
from cluster.node_messages import (
    Built,
    FromNode,
    News,
    Setup,
    SetupFailed,
    StartNode,
    Stop,
    envelopes_from_node,
)
from engine import Listener
from kv_transfer import BadMessage
from protocol import NodeInfo, NodeLost, NodeStatus, Role

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0  # loading a large model from a slow disk
STOP_TIMEOUT_S = 35.0  # then it is killed; a node itself gives its engine 30 s
_PATIENCE_S = 5.0  # then whoever waits for the stop is told why


class RemoteNode(NodeClient):
    """Implements `protocol.PrefillNode` or `DecodeNode`, as the role is. Has one event loop."""

    def __init__(
        self, setup: Setup, listener: Listener, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        super().__init__(setup.node_id)
        self._setup = setup
        self._listener = listener
        self._start_timeout_s = start_timeout_s
        self._process: ChildProcess | None = None
        self._to_close = contextlib.AsyncExitStack()
        self._info: NodeInfo | None = None
        self._status: NodeStatus | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stopping = False
        self._given_up = False  # its end is not waited for

    @property
    def info(self) -> NodeInfo:
        assert self._info is not None, f"{self.node_id} is not launched"
        return self._info

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.node_id} is not launched"
        return self._process.pid

    # ------------------------------------------------------------------ its process

    async def launch(self) -> None:
        """Start the process and have it build the node. If this fails, `stop` cleans up.

        Raises:
            ConfigError, ModelError: what the node says of its settings or its model.
            NodeLost: the process ended without a word, or took too long.
        """
        try:
            self._process = ChildProcess("cluster.node_process")
        except OSError as error:
            raise NodeLost(f"node {self.node_id} cannot be started: {error.strerror}") from error
        self._to_close.callback(self._process.end.close)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._info = await self._build(self._process)
        except TimeoutError as error:
            raise NodeLost(
                f"node {self.node_id} did not start within {self._start_timeout_s:g} s"
            ) from error
        self._reading = asyncio.create_task(self._read_all())

    async def _build(self, process: ChildProcess) -> NodeInfo:
        self._channel = await Channel.open(process.end, envelopes_from_node)
        self._to_close.push_async_callback(self._channel.close)
        with contextlib.suppress(ConnectionError):  # then it has ended, which `receive` tells
            await self._channel.send(self._setup)
        match await self._channel.receive():
            case Built(info):
                return info
            case SetupFailed(error):
                raise error.restored()
            case message:
                assert message is None, message
                ended = describe_exit(await process.wait())
                raise NodeLost(f"node {self.node_id} {ended} before it was ready")

    async def start(self) -> None:
        """Have it take jobs; when this returns, it has told of itself. Raises NodeLost."""
        number = next(self._numbers)
        answer = await self._send(number, StartNode(number), ANSWER_TIMEOUT_S)
        assert answer.status is not None
        if self._status is None:
            self._note(answer.status)

    async def stop(self) -> None:
        """Requests under way are lost. Returns when the process has ended."""
        if self._process is None:
            return
        self._stopping = True
        if self._info is None:
            self._process.kill()  # it builds, hears nothing, and has nothing to lose
        elif not self._lost:
            self._channel.post(Stop())
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._process.wait()
        except TimeoutError:
            await self._wait_longer(self._process)
        if self._reading is not None:
            await self._reading  # to the end of what it said
        await self._to_close.aclose()

    def kill(self) -> None:
        """Who waits for its end need not wait any longer. Requests under way are lost."""
        self._given_up = True
        if self._process is not None:
            self._process.kill()

    async def _wait_longer(self, process: ChildProcess) -> None:
        left = STOP_TIMEOUT_S - _PATIENCE_S
        logger.warning(
            "%s has not stopped yet; it is killed in %.0f s, or if told to stop once more",
            self.node_id,
            left,
        )
        try:
            async with asyncio.timeout(left):
                await process.wait()
        except TimeoutError:
            logger.error("%s did not stop within %.0f s", self.node_id, STOP_TIMEOUT_S)
            process.kill()
            await process.wait()

    # ------------------------------------------------------------------ what it says

    async def change_role(self, role: Role) -> NodeInfo:
        self._info = await super().change_role(role)
        return self._info

    async def _read_all(self) -> None:
        """Until the process has ended; then nobody waits for it any more."""
        assert self._process is not None
        understood = False
        try:
            await self._channel.receive_all(self._hear)
            understood = True
        except BadMessage as error:
            logger.error("node %s is killed: %s", self.node_id, error)
        finally:
            if not understood:
                self._process.kill()
            self._lose()
            await self._tell_loss(self._process)

    def _hear(self, message: FromNode) -> None:
        match message:
            case News(status, batches):
                for events in batches:
                    self._listener.on_blocks(self.info, events)
                self._note(status)
            case Built() | SetupFailed():
                raise AssertionError(message)
            case reply:
                self._take(reply)

    def _note(self, status: NodeStatus) -> None:
        self._status = status
        self._listener.on_status(self.info, status)

    async def _tell_loss(self, process: ChildProcess) -> None:
        exit_status = await process.wait()
        if self._stopping and (exit_status == 0 or self._given_up):
            return
        logger.error("node %s %s", self.node_id, describe_exit(exit_status))
        if self._status is not None:
            down = msgspec.structs.replace(self._status, healthy=False)
            self._listener.on_status(self.info, down)
