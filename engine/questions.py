"""Questions from event loops, which the engine's thread answers between two steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from protocol import NodeLost

AnswerT = TypeVar("AnswerT")


class Questions:
    """Those that were not answered yet."""

    def __init__(
        self,
        node_id: str,
        post: Callable[[Callable[[], None]], None],
        check_runs: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """`post` runs something on the engine's thread; `check_runs` raises NodeLost, once that
        may have looked for the last time.
        """
        self._node_id = node_id
        self._post = post
        self._check_runs = check_runs
        self._timeout_s = timeout_s
        self._unanswered: set[Callable[[], object]] = set()  # to be called if the node stops

    async def ask(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Raises NodeLost: the node does not run. TimeoutError: a step takes too long."""
        self._check_runs()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[AnswerT] = loop.create_future()

        def answer() -> None:
            call_soon(loop, partial(_resolve, done, question()))

        def give_up() -> None:
            lost = NodeLost(f"node {self._node_id} stopped")
            call_soon(loop, partial(_reject, done, lost))

        self._unanswered.add(give_up)
        try:
            self._post(answer)
            self._check_runs()
            async with asyncio.timeout(self._timeout_s):
                return await done
        finally:
            self._unanswered.discard(give_up)

    def give_up(self) -> None:
        """The thread ends: nobody is kept waiting."""
        for give_up in list(self._unanswered):
            give_up()


def _resolve(done: asyncio.Future[AnswerT], value: AnswerT) -> None:
    if not done.done():  # else nobody waits any more
        done.set_result(value)


def _reject(done: asyncio.Future[AnswerT], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call back in the caller's event loop; if that is closed, nobody waits any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
