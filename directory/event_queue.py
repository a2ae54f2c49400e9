"""What one subscriber has not yet drained."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from directory.directory import Gap
from protocol import BlockEventBatch


class EventQueues:
    """All subscriptions of one directory, which share its lock; hold it for all but `drain`."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._queues: list[EventQueue] = []

    def __iter__(self) -> Iterator[EventQueue]:
        return iter(self._queues)

    def add(self, max_batches: int) -> EventQueue:
        queue = EventQueue(self._lock, self._queues, max_batches)
        self._queues.append(queue)
        return queue

    def put(self, item: BlockEventBatch | Gap) -> None:
        for queue in self._queues:
            queue.put(item)

    def forget(self, node_id: str) -> None:
        for queue in self._queues:
            queue.forget(node_id)


class EventQueue:
    """Implements `Subscription`."""

    def __init__(self, lock: threading.Lock, others: list[EventQueue], max_batches: int) -> None:
        assert max_batches > 0
        self._lock = lock
        self._others = others  # and this one, until it is closed
        self._max_batches = max_batches
        self._items: deque[BlockEventBatch | Gap] = deque()
        self._lost: dict[str, int] = {}  # node id → the last sequence number that was dropped

    def drain(self) -> list[BlockEventBatch | Gap]:
        with self._lock:
            # What was dropped is older than all that is left, so the gaps come first.
            drained: list[BlockEventBatch | Gap] = [Gap(*lost) for lost in self._lost.items()]
            drained += self._items
            self._lost.clear()
            self._items.clear()
            return drained

    def close(self) -> None:
        with self._lock:
            if self in self._others:
                self._others.remove(self)
            self._items.clear()
            self._lost.clear()

    def put(self, item: BlockEventBatch | Gap) -> None:
        """With the lock held. If there are too many, the oldest becomes a gap."""
        if len(self._items) == self._max_batches:
            dropped = self._items.popleft()
            self._lost[dropped.node_id] = dropped.sequence
        self._items.append(item)

    def forget(self, node_id: str) -> None:
        """With the lock held: nothing of this node matters any more."""
        self._items = deque(item for item in self._items if item.node_id != node_id)
        self._lost.pop(node_id, None)
