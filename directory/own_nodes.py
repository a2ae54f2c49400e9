"""The nodes that this process has registered, and what the server has not yet been told of them.

    register ──► NEW ── the server has it ──► REGISTERED ── deregister ──► LEAVING ──► (forgotten)
                  ▲                               │
                  └─── the server lost its data ──┘     a later generation registered: forgotten

Whatever is told is kept until the server has confirmed it, and of each kind only a bounded
amount: the newest status, and the last block events. Nothing here talks to anybody.
"""

from __future__ import annotations

import enum
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from directory.directory import NotRegistered, StaleGeneration
from directory.server_codec import (
    NumberedBatch,
    Registration,
    encode_batches,
    encode_registration,
    encode_status,
)
from directory.server_link import Command
from directory.server_scripts import ServerScripts
from protocol import BlockEventBatch, NodeInfo, NodeStatus

CHECK_INTERVAL_S = 1.0  # how soon a node that has nothing to tell hears that data was lost
MAX_BATCHES_IN_ENTRY = 64
MAX_BATCHES_AT_ONCE = 128  # of one node in one exchange: it is made with the lock held

_NOTHING = -1  # below all numbers


class OwnState(enum.Enum):
    NEW = "new"
    REGISTERED = "registered"
    LEAVING = "leaving"


@dataclass
class _OwnNode:
    info: NodeInfo
    ttl_s: float
    state: OwnState = OwnState.NEW
    waiting: list[Future[None]] = field(default_factory=list)  # for the server to have it
    status: NodeStatus | None = None
    beat: int = 0  # counts heartbeats
    beat_at: float = 0.0
    beat_told: int = 0
    base: int | None = None  # the number before the first batch
    last: int | None = None  # the number of the last batch
    last_told: int | None = None  # the server knows that all up to this one were sent or lost
    batches: deque[BlockEventBatch] = field(default_factory=deque)  # not confirmed
    told_at: float = float("-inf")

    @property
    def generation(self) -> int:
        return self.info.generation


@dataclass(frozen=True)
class Telling:
    """One command, and what the server knows once it has answered it."""

    node: _OwnNode
    command: Command
    state: OwnState  # of the node when this was made
    beat: int
    last: int | None


class OwnNodes:
    """Not thread-safe: its directory holds a lock around all of it."""

    def __init__(self, scripts: ServerScripts, session: str, max_unsent: int) -> None:
        self._scripts = scripts
        self._session = session  # in all processes, no other has this one
        self._max_unsent = max_unsent
        self._nodes: dict[str, _OwnNode] = {}
        self._latest: dict[str, int] = {}  # the latest known generation of each node
        self._published: dict[str, tuple[int, int]] = {}  # node id → generation, last number
        self._num_tokens = 0

    # --- what the nodes do -------------------------------------------------------------------

    def register(self, info: NodeInfo, ttl_s: float) -> Future[None]:
        """The result is there when the server has it. Raises StaleGeneration, at once or later."""
        latest = self._latest.get(info.node_id, info.generation)
        if latest > info.generation:
            raise StaleGeneration(info.node_id, info.generation, latest)
        known = self._nodes.get(info.node_id)
        node = _OwnNode(info, ttl_s)
        generation, last = self._published.get(info.node_id, (-1, 0))
        if generation == info.generation:
            # Some were dropped if it was not registered, and nobody knows who has the others.
            node.base, node.last = _NOTHING, last
        if known is not None and known.generation == info.generation:
            # What the server has not yet been told remains to be told.
            node.batches, node.waiting = known.batches, known.waiting
        elif known is not None:
            _release(known)
        confirmed: Future[None] = Future()
        node.waiting.append(confirmed)
        self._nodes[info.node_id] = node
        self._latest[info.node_id] = info.generation
        return confirmed

    def heartbeat(self, status: NodeStatus, generation: int, now: float) -> None:
        node = self._current(status.node_id, generation)
        if node is None:
            latest = self._latest.get(status.node_id, generation)
            if latest > generation:
                raise StaleGeneration(status.node_id, generation, latest)
            raise NotRegistered(status.node_id)
        node.status = status
        node.beat += 1
        node.beat_at = now

    def publish(self, batch: BlockEventBatch, generation: int) -> None:
        if generation >= self._published.get(batch.node_id, (-1, 0))[0]:
            self._published[batch.node_id] = generation, batch.sequence
        node = self._current(batch.node_id, generation)
        if node is None:
            return
        if node.base is None:
            node.base = batch.sequence - 1
        node.last = batch.sequence
        if len(node.batches) == self._max_unsent:
            # After a gap the readers need a snapshot anyway, so the others are of no use either.
            node.batches.clear()
        else:
            node.batches.append(batch)

    def deregister(self, node_id: str, generation: int) -> None:
        node = self._current(node_id, generation)
        if node is not None:
            node.state = OwnState.LEAVING
            _release(node)

    def learn(self, generations: dict[str, int]) -> None:
        """Others have registered these."""
        for node_id, generation in generations.items():
            if generation > self._latest.get(node_id, -1):
                self._latest[node_id] = generation
                node = self._nodes.get(node_id)
                if node is not None and node.generation < generation:
                    self._supersede(node, generation)

    def _current(self, node_id: str, generation: int) -> _OwnNode | None:
        node = self._nodes.get(node_id)
        if node is None or node.generation != generation or node.state is OwnState.LEAVING:
            return None
        return node

    # --- what the server is told -------------------------------------------------------------

    def tellings(self, now: float, *, with_status: bool, check: bool = False) -> list[Telling]:
        """All that there is to tell now; give each to `told`, with the answer.

        With `check`, something is told of each node: the answer shows whether it is known there.
        """
        tellings = []
        for node in self._nodes.values():
            if node.state is OwnState.NEW:
                tellings.append(self._registration(node))
            elif check or self._has_news(node, now, with_status):
                tellings.append(self._news(node, now, with_status))
            if node.state is OwnState.LEAVING:
                tellings.append(self._farewell(node))
        return tellings

    @property
    def all_told(self) -> bool:
        return all(
            node.state is OwnState.REGISTERED
            and node.beat == node.beat_told
            and node.last == node.last_told
            for node in self._nodes.values()
        )

    @property
    def in_haste(self) -> bool:
        """There is something to tell that should not wait for the next time."""
        return any(
            node.state is OwnState.NEW or len(node.batches) >= MAX_BATCHES_AT_ONCE
            for node in self._nodes.values()
        )

    def told(self, telling: Telling, answer: Any, now: float) -> None:
        """The server has answered."""
        node = telling.node
        if self._nodes.get(node.info.node_id) is not node:
            return  # meanwhile it registered again, and all of this is told once more
        if isinstance(answer, bytes) and answer.isdigit():
            self._supersede(node, int(answer))
        elif answer == b"lost":
            self._lost(node)
        elif answer == b"left":
            _release(node)
            del self._nodes[node.info.node_id]
        elif telling.state is OwnState.NEW:
            self._registered(node, telling)
        elif telling.state is OwnState.LEAVING and telling.beat < 0:
            del self._nodes[node.info.node_id]
        else:
            self._confirmed(node, telling, now)

    def expect_losses(self) -> None:
        """The server is away: when it is back, see at once what it has lost, and wait no more."""
        for node in self._nodes.values():
            node.told_at = float("-inf")
            _release(node)

    def _registered(self, node: _OwnNode, telling: Telling) -> None:
        if node.state is OwnState.NEW:
            node.state = OwnState.REGISTERED
        _release(node)

    def _confirmed(self, node: _OwnNode, telling: Telling, now: float) -> None:
        node.told_at = now
        node.beat_told = max(node.beat_told, telling.beat)
        node.last_told = telling.last
        while node.batches and telling.last is not None:
            if node.batches[0].sequence > telling.last:
                break
            node.batches.popleft()

    def _lost(self, node: _OwnNode) -> None:
        """The server has lost its data; what it was told before is told again."""
        if node.state is OwnState.REGISTERED:
            node.state = OwnState.NEW
        node.last_told = None
        node.beat_told = 0

    def _supersede(self, node: _OwnNode, generation: int) -> None:
        node_id = node.info.node_id
        self._latest[node_id] = max(generation, self._latest.get(node_id, generation))
        del self._nodes[node_id]
        for waiting in node.waiting:
            waiting.set_exception(StaleGeneration(node_id, node.generation, generation))
        node.waiting.clear()

    def _registration(self, node: _OwnNode) -> Telling:
        command = self._scripts.register(
            node.info.node_id,
            node.generation,
            encode_registration(Registration(node.info, node.ttl_s)),
            token=self._token(),
            beat=self._token(),
        )
        return Telling(node, command, OwnState.NEW, beat=0, last=None)

    def _has_news(self, node: _OwnNode, now: float, with_status: bool) -> bool:
        return (
            bool(node.batches)
            or node.last != node.last_told
            or (with_status and node.beat != node.beat_told)
            or now - node.told_at >= CHECK_INTERVAL_S
        )

    def _news(self, node: _OwnNode, now: float, with_status: bool) -> Telling:
        batches = [node.batches[i] for i in range(min(len(node.batches), MAX_BATCHES_AT_ONCE))]
        left_over = len(node.batches) > len(batches)
        last = batches[-1].sequence if left_over else node.last
        told = with_status and node.status is not None and node.beat != node.beat_told
        status = encode_status(node.status) if told and node.status is not None else b""
        command = self._scripts.write(
            node.info.node_id,
            node.generation,
            beat=self._token() if told else "",
            age_ms=max(0, int((now - node.beat_at) * 1000)) if told else 0,
            status=status,
            base=node.base,
            last=last,
            entries=_entries(node, batches),
        )
        return Telling(node, command, node.state, node.beat if told else 0, last)

    def _farewell(self, node: _OwnNode) -> Telling:
        node_id, generation = node.info.node_id, node.generation
        command = self._scripts.deregister(node_id, generation, token=self._token())
        return Telling(node, command, OwnState.LEAVING, beat=-1, last=None)

    def _token(self) -> str:
        self._num_tokens += 1
        return f"{self._session}.{self._num_tokens}"


def _entries(node: _OwnNode, batches: list[BlockEventBatch]) -> list[bytes]:
    base = node.base if node.base is not None else 0
    numbered = [NumberedBatch(node.generation, base, batch) for batch in batches]
    return [
        encode_batches(numbered[start : start + MAX_BATCHES_IN_ENTRY])
        for start in range(0, len(numbered), MAX_BATCHES_IN_ENTRY)
    ]


def _release(node: _OwnNode) -> None:
    for waiting in node.waiting:
        waiting.set_result(None)
    node.waiting.clear()
