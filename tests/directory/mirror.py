"""What a router makes of a subscription, in the plainest way, to be compared with the node."""

from __future__ import annotations

from dataclasses import dataclass, field

from directory import Gap, Subscription
from protocol import BlockEvent, BlockEventBatch, BlockHash, BlockRemoved, BlockStored


@dataclass
class Publisher:
    """A node's cache, and the number of its last batch of events."""

    node_id: str
    generation: int = 0
    sequence: int = 0
    blocks: set[BlockHash] = field(default_factory=set)
    num_made: int = 0

    def store(self) -> BlockEventBatch:
        self.num_made += 1
        name = f"{self.node_id} {self.generation} {self.num_made}".encode()
        self.blocks.add(name)
        return self._batch(BlockStored((name,), None))

    def remove(self) -> BlockEventBatch:
        removed = min(self.blocks)
        self.blocks.remove(removed)
        return self._batch(BlockRemoved((removed,)))

    def restart(self) -> None:
        self.generation += 1
        self.sequence = 0
        self.blocks.clear()

    def _batch(self, event: BlockEvent) -> BlockEventBatch:
        self.sequence += 1
        return BlockEventBatch(self.node_id, self.sequence, (event,))


@dataclass
class _Held:
    generation: int
    sequence: int = -1  # of the last batch applied; below zero: a snapshot is needed
    oldest_useful: int = -1
    blocks: set[BlockHash] = field(default_factory=set)
    pending: list[BlockEventBatch] = field(default_factory=list)


class Mirror:
    """Follows publishers through one subscription; `num_snapshots` counts what it had to ask."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._held: dict[str, _Held] = {}
        self.num_snapshots = 0

    def follow(self, generations: dict[str, int]) -> None:
        """Take in what has come. `generations` are those of the nodes that are listed."""
        for item in self._subscription.drain():
            held = self._held.get(item.node_id)
            if held is None:
                continue
            if isinstance(item, Gap):
                self._lose(held, item.sequence)
            elif held.sequence < 0:
                held.pending.append(item)
            else:
                self._apply(held, item)
        for node_id, generation in generations.items():
            if node_id not in self._held or self._held[node_id].generation != generation:
                self._held[node_id] = _Held(generation)

    def ask_snapshots(self, publishers: list[Publisher]) -> None:
        for publisher in publishers:
            held = self._held.get(publisher.node_id)
            if held is None or held.sequence >= 0 or held.generation != publisher.generation:
                continue
            if publisher.sequence < held.oldest_useful:
                continue
            self.num_snapshots += 1
            held.blocks, held.sequence = set(publisher.blocks), publisher.sequence
            pending, held.pending = held.pending, []
            for batch in pending:
                self._apply(held, batch)

    def blocks(self, node_id: str) -> set[BlockHash] | None:
        """None if a snapshot is needed."""
        held = self._held[node_id]
        return held.blocks if held.sequence >= 0 else None

    def _lose(self, held: _Held, sequence: int) -> None:
        if sequence > held.sequence:
            held.sequence = -1
            held.oldest_useful = max(held.oldest_useful, sequence)

    def _apply(self, held: _Held, batch: BlockEventBatch) -> None:
        if held.sequence < 0 or batch.sequence <= held.sequence:
            return
        assert batch.sequence == held.sequence + 1, "a loss that nobody told of"
        held.sequence = batch.sequence
        for event in batch.events:
            if isinstance(event, BlockStored):
                held.blocks.update(event.hashes)
            else:
                assert isinstance(event, BlockRemoved)
                held.blocks.difference_update(event.hashes)
