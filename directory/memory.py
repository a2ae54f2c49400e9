"""A directory within one process: local mode, tests and the simulator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from directory.directory import (
    DEFAULT_MAX_BATCHES,
    NodeRecord,
    NotRegistered,
    StaleGeneration,
)
from directory.event_queue import EventQueue, EventQueues
from protocol import BlockEventBatch, NodeInfo, NodeStatus


@dataclass
class _Registration:
    info: NodeInfo
    ttl_s: float
    seen_at: float
    status: NodeStatus | None = None


class MemoryDirectory:
    """Implements `Directory` with dicts under one lock, which is only ever held for moments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._registrations: dict[str, _Registration] = {}
        self._generations: dict[str, int] = {}  # the latest of each node; outlives deregistration
        self._queues = EventQueues(self._lock)

    def register(self, info: NodeInfo, *, ttl_s: float) -> None:
        assert ttl_s > 0
        with self._lock:
            latest = self._generations.get(info.node_id)
            if latest is not None and info.generation < latest:
                raise StaleGeneration(info.node_id, info.generation, latest)
            if latest is not None and info.generation > latest:
                self._queues.forget(info.node_id)
            self._generations[info.node_id] = info.generation
            self._registrations[info.node_id] = _Registration(info, ttl_s, self._clock())

    def heartbeat(self, status: NodeStatus, *, generation: int) -> None:
        with self._lock:
            registration = self._current(status.node_id, generation)
            if registration is None:
                latest = self._generations.get(status.node_id, generation)
                if latest > generation:
                    raise StaleGeneration(status.node_id, generation, latest)
                raise NotRegistered(status.node_id)
            registration.status = status
            registration.seen_at = self._clock()

    def deregister(self, node_id: str, *, generation: int) -> None:
        with self._lock:
            if self._current(node_id, generation) is not None:
                del self._registrations[node_id]

    def nodes(self) -> tuple[NodeRecord, ...]:
        with self._lock:
            now = self._clock()
            return tuple(
                NodeRecord(known.info, known.status, now - known.seen_at, known.ttl_s)
                for _, known in sorted(self._registrations.items())
            )

    def publish(self, batch: BlockEventBatch, *, generation: int) -> None:
        with self._lock:
            if self._current(batch.node_id, generation) is not None:
                self._queues.put(batch)

    def subscribe(self, *, max_batches: int = DEFAULT_MAX_BATCHES) -> EventQueue:
        with self._lock:
            return self._queues.add(max_batches)

    def close(self) -> None:
        pass

    def _current(self, node_id: str, generation: int) -> _Registration | None:
        registration = self._registrations.get(node_id)
        if registration is None or registration.info.generation != generation:
            return None
        return registration
