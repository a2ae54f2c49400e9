"""What a node tells whoever follows it: its status, and which blocks can be hit."""

from __future__ import annotations

from typing import Protocol

from protocol import BlockEventBatch, CacheSnapshot, NodeInfo, NodeStatus
from scheduler import Scheduler


class Listener(Protocol):
    """Whoever follows a node from outside. Called from the engine's thread; must not wait."""

    def on_status(self, info: NodeInfo, status: NodeStatus) -> None: ...

    def on_blocks(self, info: NodeInfo, batch: BlockEventBatch) -> None: ...


class Publisher:
    """Numbers the batches of block events, so that a snapshot says which it includes."""

    def __init__(self, scheduler: Scheduler, listener: Listener | None) -> None:
        self._pool = scheduler.kv.pool
        self._listener = listener
        self._sequence = 0

    def publish(self, info: NodeInfo, status: NodeStatus) -> None:
        events = self._pool.take_events()
        if self._listener is None:
            return
        if events:
            self._sequence += 1
            batch = BlockEventBatch(info.node_id, self._sequence, tuple(events))
            self._listener.on_blocks(info, batch)
        self._listener.on_status(info, status)

    def say_farewell(self, info: NodeInfo, status: NodeStatus) -> None:
        """The last that is heard. The pool may have been in the middle of something."""
        if self._listener is not None:
            self._listener.on_status(info, status)

    def snapshot(self, node_id: str) -> CacheSnapshot:
        """Of all that was published, and no more."""
        chain = self._pool.cached_chain()
        return CacheSnapshot(
            node_id,
            self._sequence,
            hashes=tuple(block for block, _ in chain),
            parents=tuple(parent for _, parent in chain),
        )
