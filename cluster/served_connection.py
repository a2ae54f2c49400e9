"""One connection to a node, at the node's end: answers its calls, and feeds its streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol, cast

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
    Request,
    ResetPrefixCache,
    Resume,
    StreamEnded,
    Undrain,
)
from cluster.wire_error import WireError
from kv_transfer import BadMessage
from protocol import (
    DecodeNode,
    KvrelayError,
    OutputBatch,
    PrefillNode,
)


class ServedNode(PrefillNode, DecodeNode, Protocol):
    """Its role says which of the two it is now; jobs of the other kind raise WrongRole."""


MAX_CALLS = 8192  # under way; they are answered as fast as they are read, but for a few
MAX_STREAMS = 64


class ServedConnection:
    """Its tasks belong to `tasks`; an exception that leaves one of them is a bug."""

    def __init__(
        self,
        node: ServedNode,
        channel: Channel[Any],
        tasks: asyncio.TaskGroup,
        on_new_role: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_new_role` is called when a call has changed the role, and was answered."""
        self._node = node
        self._channel = channel
        self._tasks = tasks
        self._on_new_role = on_new_role
        self._calls: set[asyncio.Task[None]] = set()
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._listeners: dict[int, str] = {}  # callers, by stream
        self.deaf: set[str] = set()  # callers that have sent jobs, and had no stream here

    @property
    def listeners(self) -> set[str]:
        """Callers that have a stream here."""
        return set(self._listeners.values())

    # ------------------------------------------------------------------ its two ends

    async def take(self, message: Request) -> None:
        """Raises BadMessage: no caller in its right mind would say that."""
        match message:
            case Call() as call:
                self._start(call)
            case OpenStream(stream, caller):
                self._open(stream, caller)
                await asyncio.sleep(0)  # it has to begin, so that it can be cancelled in order
            case CloseStream(stream):
                if stream in self._streams:
                    self._forget(stream).cancel()

    def cancel_calls(self) -> None:
        for call in self._calls:
            call.cancel()

    async def end(self) -> None:
        """Returns when no stream is left here, and so no job of those that read them."""
        tasks = [*self._calls, *self._streams.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # what they raise is the group's
        self._streams.clear()
        self._listeners.clear()

    # ------------------------------------------------------------------ calls

    def _start(self, call: Call) -> None:
        if len(self._calls) >= MAX_CALLS:
            raise BadMessage(f"more than {MAX_CALLS} calls are under way")
        task = self._tasks.create_task(self._answer(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, call: Call) -> None:
        answer: Answered | Refused
        try:
            answer = await self._ask_node(call.number, call.question)
        except (KvrelayError, TimeoutError) as error:
            answer = Refused(call.number, WireError.of(error))
        try:
            await self._say(answer)
        except BadMessage as error:  # a snapshot that is too long
            await self._say(Refused(call.number, WireError.of(error)))
        if isinstance(answer, Answered) and isinstance(call.question, ChangeRole):
            self._on_new_role()

    async def _ask_node(self, number: int, question: Question) -> Answered:
        node = self._node
        match question:
            case Prefill(job):
                self._note(job.caller)
                await node.prefill(job)
            case Decode(job):
                self._note(job.caller)
                await node.decode(job)
            case Cancel(request_id):
                await node.cancel(request_id)
            case AskStatus():
                return Answered(number, status=await node.status())
            case AskSnapshot():
                return Answered(number, snapshot=await node.snapshot())
            case Drain(timeout_s):
                await node.drain(timeout_s)
            case Undrain():
                await node.undrain()
            case ChangeRole(role):
                return Answered(number, info=await node.change_role(role))
            case Pause(mode):
                await node.pause(mode)
            case Resume():
                await node.resume()
            case ResetPrefixCache(running):
                done = await node.reset_prefix_cache(reset_running_requests=running)
                return Answered(number, flag=done)
        return Answered(number)

    def _note(self, caller: str) -> None:
        if caller not in self._listeners.values():
            self.deaf.add(caller)

    # ------------------------------------------------------------------ streams

    def _open(self, stream: int, caller: str) -> None:
        if stream in self._streams:
            raise BadMessage(f"stream {stream} is open already")
        if len(self._streams) >= MAX_STREAMS:
            raise BadMessage(f"more than {MAX_STREAMS} streams")
        batches = self._node.outputs(caller)  # now, before the jobs that come next
        self._streams[stream] = self._tasks.create_task(self._forward(stream, batches))
        self._listeners[stream] = caller
        self.deaf.discard(caller)

    def _forget(self, stream: int) -> asyncio.Task[None]:
        del self._listeners[stream]
        return self._streams.pop(stream)

    async def _forward(self, stream: int, batches: AsyncIterator[OutputBatch]) -> None:
        async with contextlib.aclosing(cast(AsyncGenerator[OutputBatch, None], batches)) as its:
            async for batch in its:
                await self._say(Outputs(stream, batch))
        if stream in self._streams:
            self._forget(stream)
        await self._say(StreamEnded(stream))

    async def _say(self, message: object) -> None:
        """Whoever reads the channel notices that nobody is there any more."""
        with contextlib.suppress(OSError):
            await self._channel.send(message)
