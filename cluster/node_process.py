"""A process that is one node: `python -m cluster.node_process --fd N`, started by its cluster.

It gets everything over the socket that it inherits as descriptor N, and ends as soon as the other
end of that is closed. Signals that stop the cluster reach it too, and mean nothing here: the
cluster says when to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import cast

from cluster.channel import Channel
from cluster.config import LocalConfig
from cluster.news import NewsCollector
from cluster.node_builder import BuiltNode, NodeBuilder, stop_node
from cluster.node_compute import RunnerFactory
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
    ToNode,
    envelopes_to_node,
)
from cluster.transports import make_transport
from cluster.wire_error import WireError
from decode_node import LocalDecodeNode
from engine.weights import ModelFiles
from kv_transfer import MemoryHub
from prefill_node import LocalPrefillNode
from protocol import ConfigError, KvrelayError, OutputBatch

ComputeMaker = Callable[[ModelFiles, LocalConfig], RunnerFactory]

_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster.node_process")
    parser.add_argument("--fd", type=int, required=True, help="one end of a socket pair")
    end = socket.socket(fileno=parser.parse_args().fd)
    end.set_inheritable(False)
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)  # blocked since before exec
    _die_with_parent()
    watch = threading.Thread(target=_end_with, args=(end.fileno(),), name="parent", daemon=True)
    watch.start()
    asyncio.run(_run(end))


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. It does even while it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(fd: int) -> None:
    """End the process, whatever it is doing, when the other end of its socket is closed.

    The parent may have died before it could be watched, or may have lost interest.
    """
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


async def _run(end: socket.socket) -> None:
    channel: Channel[ToNode] = await Channel.open(end, envelopes_to_node)
    setup = await channel.receive()
    assert isinstance(setup, Setup), setup
    _set_up_logging(setup)
    news = NewsCollector()
    try:
        node = _build(setup, news)
    except KvrelayError as error:
        await channel.send(SetupFailed(WireError.of(error)))
    else:
        await channel.send(Built(node.info))
        await NodeServer(node, channel, news).run()
    await channel.close()


def _set_up_logging(setup: Setup) -> None:
    name = setup.node_id.replace("%", "%%")
    logging.basicConfig(
        level=setup.log_level, format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"
    )


def _build(setup: Setup, news: NewsCollector) -> BuiltNode:
    """Raises ConfigError, ModelError: as `NodeBuilder.build` does."""
    hub = MemoryHub()
    _use_cores(setup)
    builder = NodeBuilder(
        config=setup.config,
        files=setup.files,
        make_compute=_compute_maker(setup)(setup.files, setup.config),
        make_transport=lambda node_id: make_transport(
            setup.config, node_id, hub=hub, token=setup.token.value
        ),
        listener=news,
    )
    return builder.build(setup.role, setup.node_id, setup.generation)


def _use_cores(setup: Setup) -> None:
    """Before torch is imported: that is when it looks."""
    if setup.cpus is not None:
        try:
            os.sched_setaffinity(0, setup.cpus)
        except OSError as error:
            raise ConfigError("cpus", f"{list(setup.cpus)}: {error.strerror}") from error
    os.environ["OMP_NUM_THREADS"] = str(setup.threads)


def _compute_maker(setup: Setup) -> ComputeMaker:
    sys.path += [entry for entry in setup.module_path if entry not in sys.path]
    module, _, name = setup.compute.partition(":")
    return cast(ComputeMaker, getattr(importlib.import_module(module), name))


class NodeServer:
    """Answers what comes over the channel, until Stop."""

    def __init__(self, node: BuiltNode, channel: Channel[ToNode], news: NewsCollector) -> None:
        self._node = node
        self._channel = channel
        self._news = news
        self._calls: set[asyncio.Task[None]] = set()
        self._streams: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        # An exception of a task is a bug: it ends the process, which the parent notices.
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._tell_news())
            await self._serve(tasks)
            for call in self._calls:
                call.cancel()
            await asyncio.to_thread(stop_node, self._node)  # which ends the streams
            telling.cancel()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            match await self._channel.receive():
                case Call() as call:
                    task = tasks.create_task(self._answer(call))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                case OpenStream(stream, caller):
                    batches = self._node.outputs(caller)  # now, before the jobs that come next
                    self._streams[stream] = tasks.create_task(self._forward(stream, batches))
                    await asyncio.sleep(0)  # it has to begin, so that it can be cancelled in order
                case CloseStream(stream):
                    if stream in self._streams:
                        self._streams.pop(stream).cancel()
                case Stop() | None:
                    return

    async def _answer(self, call: Call) -> None:
        answer: Answered | Refused
        try:
            answer = await self._ask_node(call.number, call.question)
        except (KvrelayError, TimeoutError) as error:
            answer = Refused(call.number, WireError.of(error))
        await self._channel.send(answer)

    async def _ask_node(self, number: int, question: Question) -> Answered:
        node = self._node
        match question:
            case StartNode():
                node.start()
                return Answered(number, status=await node.status())
            case Prefill(job):
                assert isinstance(node, LocalPrefillNode)
                await node.prefill(job)
            case Decode(job):
                assert isinstance(node, LocalDecodeNode)
                await node.decode(job)
            case Cancel(request_id):
                await node.cancel(request_id)
            case AskStatus():
                return Answered(number, status=await node.status())
            case AskSnapshot():
                return Answered(number, snapshot=await node.snapshot())
            case Drain():
                await node.drain()
            case Pause(mode):
                await node.pause(mode)
            case Resume():
                await node.resume()
            case ResetPrefixCache(running):
                done = await node.reset_prefix_cache(reset_running_requests=running)
                return Answered(number, flag=done)
        return Answered(number)

    async def _forward(self, stream: int, batches: AsyncIterator[OutputBatch]) -> None:
        async with contextlib.aclosing(cast(AsyncGenerator[OutputBatch, None], batches)) as its:
            async for batch in its:
                await self._channel.send(Outputs(stream, batch))
        self._streams.pop(stream, None)
        await self._channel.send(StreamEnded(stream))

    async def _tell_news(self) -> None:
        while True:
            await self._channel.send(await self._news.take())


if __name__ == "__main__":
    main()
