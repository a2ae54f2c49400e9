"""Waits for many files at once, without using the processor."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

Handler = Callable[[int], None]  # is given the events

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class Poller:
    """Files may be added and removed by any thread while one waits.

    A handler may still be called once after its file has been removed.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._waker, READ)
        self._handlers: dict[int, Handler] = {}

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def wake(self) -> None:
        """Let the next, or present, `wait` return."""
        os.eventfd_write(self._waker, 1)

    def wait(self, timeout_s: float | None) -> list[tuple[Handler, int]]:
        """What happened, within so much time or (None) ever."""
        ready = []
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._waker:
                os.eventfd_read(fd)
            elif (handler := self._handlers.get(fd)) is not None:
                ready.append((handler, events))
        return ready

    def close(self) -> None:
        self._epoll.close()
        os.close(self._waker)
