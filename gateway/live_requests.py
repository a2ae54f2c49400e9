"""Work for clients: it ends when it is done, when its client leaves, or when the server stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from gateway.errors import ClientGone
from protocol import RequestAborted

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LiveRequests:
    """All requests that are being answered, so that a shutdown can end them at once."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def attend(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled as soon as nobody waits for it any more.

        `receive` is that of a request whose body has been read: all that it can still say is that
        the client left. On return `work` has ended, cleaned up behind itself, in every case.

        Raises:
            ClientGone: the client left first.
            RequestAborted: `abort` was called.
        """
        if self._closed:
            work.close()
            raise _stopping()
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone("the client closed the connection")
            if task.cancelled():
                raise _stopping()
            return task.result()
        finally:
            self._tasks.discard(task)
            await _cancelled(task, gone)

    def abort(self) -> None:
        """End every request now, and take no further one. The server is about to stop."""
        self._closed = True
        for task in self._tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs and wait until it has ended."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    for failure in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(failure, Exception):
            logger.error("a cancelled request failed to clean up", exc_info=failure)


def _stopping() -> RequestAborted:
    return RequestAborted("the server is shutting down")
