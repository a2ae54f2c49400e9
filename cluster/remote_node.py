"""A node in a process of its own, as the process that started it sees it.

launch ─► Setup ─► Built: `info` is known ─► start ─► calls, streams, news ─► stop
                                                        └─► the process has died: NodeLost
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator

import msgspec

from cluster.channel import Channel
from cluster.child_process import ChildProcess, describe_exit
from cluster.node_messages import (
    Answered,
    AskSnapshot,
    AskStatus,
    Built,
    Call,
    Cancel,
    CloseStream,
    Decode,
    Drain,
    FromNode,
    News,
    OpenStream,
    Outputs,
    Pause,
    Prefill,
    Question,
    Refused,
    ResetPrefixCache,
    Resume,
    Setup,
    SetupFailed,
    StartNode,
    Stop,
    StreamEnded,
    envelopes_from_node,
)
from engine import Listener
from engine.outputs import OutputStream
from kv_transfer import BadMessage
from protocol import (
    CacheSnapshot,
    DecodeJob,
    NodeInfo,
    NodeLost,
    NodeStatus,
    OutputBatch,
    PauseMode,
    PrefillJob,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0  # loading a large model from a slow disk
ANSWER_TIMEOUT_S = 30.0  # a step may run before a question is answered
STOP_TIMEOUT_S = 35.0  # then it is killed; a node itself gives its engine 30 s
_PATIENCE_S = 5.0  # then whoever waits for the stop is told why


class RemoteNode:
    """Implements `protocol.PrefillNode` or `DecodeNode`, as the role is. Has one event loop."""

    def __init__(
        self, setup: Setup, listener: Listener, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self.node_id = setup.node_id
        self._setup = setup
        self._listener = listener
        self._start_timeout_s = start_timeout_s
        self._process: ChildProcess | None = None
        self._channel: Channel[FromNode]  # once the process runs
        self._to_close = contextlib.AsyncExitStack()
        self._info: NodeInfo | None = None
        self._status: NodeStatus | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lost = False
        self._stopping = False
        self._given_up = False  # its end is not waited for
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Answered]] = {}
        self._streams: dict[int, OutputStream] = {}

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
        answer = await self._ask(StartNode())
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

    # ------------------------------------------------------------------ protocol.Node

    async def prefill(self, job: PrefillJob) -> None:
        await self._ask(Prefill(job))

    async def decode(self, job: DecodeJob) -> None:
        await self._ask(Decode(job))

    async def cancel(self, request_id: str) -> None:
        await self._ask(Cancel(request_id))

    async def status(self) -> NodeStatus:
        status = (await self._ask(AskStatus())).status
        assert status is not None
        return status

    async def drain(self) -> None:
        await self._ask(Drain(), timeout_s=None)  # as long as the jobs take

    async def snapshot(self) -> CacheSnapshot:
        snapshot = (await self._ask(AskSnapshot())).snapshot
        assert snapshot is not None
        return snapshot

    async def pause(self, mode: PauseMode) -> None:
        await self._ask(Pause(mode))

    async def resume(self) -> None:
        await self._ask(Resume())

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        return (await self._ask(ResetPrefixCache(reset_running_requests))).flag

    def outputs(self, caller: str) -> AsyncIterator[OutputBatch]:
        number, stream = next(self._numbers), OutputStream()
        if self._lost:
            stream.close()
        else:
            self._streams[number] = stream
            self._channel.post(OpenStream(number, caller))
        return self._read(number, stream)

    async def _read(self, number: int, stream: OutputStream) -> AsyncIterator[OutputBatch]:
        try:
            async for batch in stream.read():
                yield batch
        finally:
            self._close_stream(number)

    # ------------------------------------------------------------------ calls and answers

    async def _ask(
        self, question: Question, timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> Answered:
        """Raises what the node raises; NodeLost; TimeoutError: it does not answer."""
        if self._lost:
            raise self._loss()
        number = next(self._numbers)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):  # it has died: the reader tells all
                    await self._channel.send(Call(number, question))
                return await answer
        finally:
            del self._calls[number]

    def _loss(self) -> NodeLost:
        return NodeLost(f"node {self.node_id} is down")

    async def _read_all(self) -> None:
        """Until the process has ended; then nobody waits for it any more."""
        assert self._process is not None
        understood = False
        try:
            while (message := await self._channel.receive()) is not None:
                self._take(message)
            understood = True
        except BadMessage as error:
            logger.error("node %s is killed: %s", self.node_id, error)
        finally:
            if not understood:
                self._process.kill()
            await self._lose(self._process)

    def _take(self, message: FromNode) -> None:
        match message:
            case Answered(number):
                if (call := self._calls.get(number)) and not call.done():
                    call.set_result(message)
            case Refused(number, error):
                if (call := self._calls.get(number)) and not call.done():
                    call.set_exception(error.restored())
            case Outputs(number, batch):
                if (stream := self._streams.get(number)) and not stream.put(batch):
                    self._close_stream(number)  # a caller that does not read is gone
            case StreamEnded(number):
                if number in self._streams:
                    self._streams.pop(number).close()
            case News(status, batches):
                for events in batches:
                    self._listener.on_blocks(self.info, events)
                self._note(status)
            case Built() | SetupFailed():
                raise AssertionError(message)

    def _note(self, status: NodeStatus) -> None:
        self._status = status
        self._listener.on_status(self.info, status)

    def _close_stream(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close()
            self._channel.post(CloseStream(number))

    async def _lose(self, process: ChildProcess) -> None:
        self._lost = True
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self._loss())
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        exit_status = await process.wait()
        if self._stopping and (exit_status == 0 or self._given_up):
            return
        logger.error("node %s %s", self.node_id, describe_exit(exit_status))
        if self._status is not None:
            down = msgspec.structs.replace(self._status, healthy=False)
            self._listener.on_status(self.info, down)
