"""What a node tells its callers: one stream each, one batch a round."""

from __future__ import annotations

import logging
import threading

from engine.outputs import OutputStream
from protocol import Delta, OutputBatch

logger = logging.getLogger(__name__)


class Callers:
    """Streams are opened from any thread, all else happens on the engine's."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._lock = threading.Lock()
        self._streams: dict[str, OutputStream] = {}
        self._deltas: dict[str, list[Delta]] = {}  # of this round

    def open(self, caller: str) -> OutputStream:
        """A second stream of a caller ends the first."""
        stream = OutputStream()
        with self._lock:
            old = self._streams.get(caller)
            self._streams[caller] = stream
        if old is not None:
            old.close()
        return stream

    def forget(self, caller: str, stream: OutputStream) -> bool:
        """Whether it was still the caller's."""
        with self._lock:
            if self._streams.get(caller) is not stream:
                return False
            del self._streams[caller]
            return True

    def tell(self, caller: str, delta: Delta) -> None:
        """With the next `deliver`."""
        self._deltas.setdefault(caller, []).append(delta)

    def deliver(self) -> list[str]:
        """The callers that do not listen any more."""
        deltas, self._deltas = self._deltas, {}
        gone = []
        for caller, its in deltas.items():
            with self._lock:
                stream = self._streams.get(caller)
            if stream is not None and stream.put(OutputBatch(self._node_id, tuple(its))):
                continue
            logger.info("%s: caller %s does not listen", self._node_id, caller)
            if stream is not None:  # if it reads after all, it finds that its stream ended
                self.forget(caller, stream)
                stream.close()
            gone.append(caller)
        return gone

    def close(self) -> None:
        """Nobody is told anything any more."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()
