"""From the engine's thread to a caller's event loop: one stream per caller, one batch a step."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator

from protocol import OutputBatch

MAX_BATCHES = 4096  # unread; a caller so far behind is taken for gone


class OutputStream:
    """Batches for one caller. Written by one thread, read in one event loop."""

    def __init__(self, max_batches: int = MAX_BATCHES) -> None:
        self._max_batches = max_batches
        self._batches: deque[OutputBatch] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event, int] | None = None

    def put(self, batch: OutputBatch) -> bool:
        """False if the caller does not read any more."""
        with self._lock:
            if self._closed or len(self._batches) >= self._max_batches:
                return False
            self._batches.append(batch)
            return self._wake()

    def close(self) -> None:
        """No more will come; what is there can still be read."""
        with self._lock:
            self._closed = True
            self._wake()

    def _wake(self) -> bool:
        if self._reader is None:
            return True
        loop, event, thread = self._reader
        try:
            if thread == threading.get_ident() and not loop.is_closed():
                event.set()  # the loop need not be woken from its sleep: it runs
            else:
                loop.call_soon_threadsafe(event.set)
        except RuntimeError:  # its event loop is closed
            return False
        return True

    async def read(self) -> AsyncIterator[OutputBatch]:
        """All batches in order, until `close`."""
        event = asyncio.Event()
        with self._lock:
            self._reader = (asyncio.get_running_loop(), event, threading.get_ident())
        try:
            while True:
                event.clear()
                with self._lock:
                    batches = list(self._batches)
                    self._batches.clear()
                    closed = self._closed
                for batch in batches:
                    yield batch
                if closed:
                    return
                if not batches:
                    await event.wait()
        finally:
            with self._lock:
                self._reader = None
