"""A process that is one node: `python -m cluster.node_process --fd N`, started by its cluster.

It gets everything over the socket that it inherits as descriptor N, and ends as soon as the other
end of that is closed. Signals that stop the cluster reach it too, and mean nothing here: the
cluster says when to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import select
import signal
import socket
import threading

from cluster.channel import Channel
from cluster.engine_node import EngineNode
from cluster.news import NewsCollector
from cluster.node_builder import stop_node
from cluster.node_messages import (
    Answered,
    Built,
    Call,
    CloseStream,
    OpenStream,
    Setup,
    SetupFailed,
    StartNode,
    Stop,
    ToNode,
    envelopes_to_node,
)
from cluster.node_setup import build_node, set_up_logging
from cluster.served_connection import ServedConnection
from cluster.wire_error import WireError
from protocol import KvrelayError

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
    set_up_logging(setup.node_id, setup.log_level)
    news = NewsCollector()
    try:
        node = build_node(setup, news)
    except KvrelayError as error:
        await channel.send(SetupFailed(WireError.of(error)))
    else:
        await channel.send(Built(node.info))
        await NodeServer(node, channel, news).run()
    await channel.close()


class NodeServer:
    """Answers what comes over the channel, until Stop."""

    def __init__(self, node: EngineNode, channel: Channel[ToNode], news: NewsCollector) -> None:
        self._node = node
        self._channel = channel
        self._news = news

    async def run(self) -> None:
        # An exception of a task is a bug: it ends the process, which the parent notices.
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._tell_news())
            connection = ServedConnection(self._node, self._channel, tasks)
            await self._serve(connection)
            connection.cancel_calls()
            await asyncio.to_thread(stop_node, self._node)  # which ends the streams
            telling.cancel()

    async def _serve(self, connection: ServedConnection) -> None:
        while True:
            match await self._channel.receive():
                case Call() | OpenStream() | CloseStream() as request:
                    await connection.take(request)
                case StartNode(number):
                    self._node.start()
                    status = await self._node.status()
                    await self._channel.send(Answered(number, status=status))
                case Stop() | None:
                    return
                case Setup() as again:
                    raise AssertionError(again)

    async def _tell_news(self) -> None:
        while True:
            await self._channel.send(await self._news.take())


if __name__ == "__main__":
    main()
