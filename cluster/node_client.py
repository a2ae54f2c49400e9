"""A node in another process, as its callers see it: calls by number, and streams.

The reader of the channel gives `_take` what the node says. When there is no more to come, `_lose`
ends all calls and streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

from cluster.channel import Channel
from cluster.node_messages import (
    Answered,
    AskSnapshot,
    AskStatus,
    Call,
    Cancel,
    ChangeRole,
    CloseStream,
    Decode,
    Drain,
    OpenStream,
    Outputs,
    Pause,
    Prefill,
    Question,
    Refused,
    Reply,
    ResetPrefixCache,
    Resume,
    StartNode,
    StreamEnded,
    Undrain,
)
from engine.outputs import OutputStream
from protocol import (
    CacheSnapshot,
    DecodeJob,
    NodeInfo,
    NodeLost,
    NodeStatus,
    OutputBatch,
    PauseMode,
    PrefillJob,
    Role,
)

ANSWER_TIMEOUT_S = 30.0  # a step may run before a question is answered


class NodeClient:
    """`protocol.PrefillNode` or `DecodeNode`, as the role is, but for `info`. Has one event loop.

    Calls raise what the node raises, NodeLost, or TimeoutError: it does not answer.
    """

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._channel: Channel[Any]  # once there is one
        self._lost = False
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Answered]] = {}
        self._streams: dict[int, OutputStream] = {}

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

    async def drain(self, timeout_s: float | None = None) -> None:
        patience = None if timeout_s is None else timeout_s + ANSWER_TIMEOUT_S
        await self._ask(Drain(timeout_s), patience)  # None: as long as the jobs take

    async def undrain(self) -> None:
        await self._ask(Undrain())

    async def change_role(self, role: Role) -> NodeInfo:
        info = (await self._ask(ChangeRole(role), None)).info  # as long as the jobs take
        assert info is not None
        return info

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
        number = next(self._numbers)
        return await self._send(number, Call(number, question), timeout_s)

    async def _send(
        self, number: int, message: Call | StartNode, timeout_s: float | None
    ) -> Answered:
        if self._lost:
            raise self._loss()
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(OSError):  # it is lost: the reader tells all
                    await self._channel.send(message)
                return await answer
        finally:
            del self._calls[number]

    def _loss(self) -> NodeLost:
        return NodeLost(f"node {self.node_id} is down")

    def _take(self, message: Reply) -> None:
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

    def _close_stream(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close()
            self._channel.post(CloseStream(number))

    def _lose(self) -> None:
        """Nobody waits for the node any more."""
        self._lost = True
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self._loss())
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
