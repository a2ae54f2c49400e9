"""Where those come in that want to connect to this node."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from kv_transfer.peering.poller import READ, Poller

logger = logging.getLogger(__name__)

_MAX_ACCEPTS = 64  # in one go
_PAUSE_S = 0.5  # when this process has no descriptors left


class Door:
    """Peers may come from the beginning, but are not let in before `open`."""

    def __init__(
        self, listener: socket.socket, poller: Poller, take_in: Callable[[socket.socket], None]
    ) -> None:
        self.opens_at: float | None = None  # when paused
        self._listener = listener
        self._poller = poller
        self._take_in = take_in

    def open(self) -> None:
        self.opens_at = None
        self._poller.watch(self._listener.fileno(), READ, self._on_knock)

    def open_if_due(self, now: float) -> None:
        if self.opens_at is not None and now >= self.opens_at:
            self.open()

    def close(self) -> None:
        self.opens_at = None
        self._poller.unwatch(self._listener.fileno())
        self._listener.close()

    def _on_knock(self, _events: int) -> None:
        if self._listener.fileno() < 0:  # closed since the poller saw it
            return
        for _ in range(_MAX_ACCEPTS):
            try:
                opened, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause(error)
                return
            opened.setblocking(False)
            self._take_in(opened)

    def _pause(self, error: OSError) -> None:
        logger.warning("cannot take in peers for now: %s", error)
        self._poller.unwatch(self._listener.fileno())
        self.opens_at = time.monotonic() + _PAUSE_S
