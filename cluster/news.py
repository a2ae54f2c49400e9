"""What a node's engine tells of itself, on its way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

from cluster.node_messages import News
from protocol import BlockEventBatch, NodeInfo, NodeStatus

MAX_BATCHES = 4096  # of block events; if more wait, the oldest are a gap in the numbers


class NewsCollector:
    """A `Listener` that never waits: of statuses it keeps the newest, of events the last ones."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._status: NodeStatus | None = None
        self._blocks: deque[BlockEventBatch] = deque(maxlen=MAX_BATCHES)
        self._something = asyncio.Event()

    def on_status(self, info: NodeInfo, status: NodeStatus) -> None:
        with self._lock:
            known, self._status = self._status is not None, status
        if not known:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                self._loop.call_soon_threadsafe(self._something.set)

    def on_blocks(self, info: NodeInfo, batch: BlockEventBatch) -> None:
        """A status follows, and wakes."""
        with self._lock:
            self._blocks.append(batch)

    async def take(self) -> News:
        """Wait for a status; it comes with all events before it."""
        while True:
            await self._something.wait()
            self._something.clear()
            with self._lock:
                status, self._status = self._status, None
                blocks = tuple(self._blocks)
                self._blocks.clear()
            if status is not None:
                return News(status, blocks)
