"""Which node has how much of a prompt in its prefix cache, as far as the router knows.

The index follows the nodes' caches through numbered event batches:

    CURRENT ── batch n + 1 ──► CURRENT
    CURRENT ── a number was skipped, or the directory tells of a gap ──► NEEDS_SNAPSHOT
    NEEDS_SNAPSHOT ── a batch ──► NEEDS_SNAPSHOT   (kept until the snapshot is here)
    NEEDS_SNAPSHOT ── a snapshot that is not older than the gap ──► CURRENT, then the kept batches

A node begins in NEEDS_SNAPSHOT: nobody knows what it did before the router saw it. While it
waits there, the last known blocks still count: they are a hint for routing, and what is really
cached is found out on the node.

Chains are given in hashes of `HASH_BLOCK_SIZE` tokens. A node with larger blocks, of k such
pieces, names each by the hash of its last piece, so only every k-th hash is looked up there:

    hashes       h0 h1 h2 h3 h4 h5 h6
    k = 1        h0 h1 h2 h3 h4 h5 h6
    k = 2           h1    h3    h5
    k = 4                 h3
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from protocol import (
    HASH_BLOCK_SIZE,
    BlockEvent,
    BlockEventBatch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    CacheSnapshot,
    NodeInfo,
)
from router.chains import ChainSet

MAX_PENDING_BATCHES = 1024  # of one node, while its snapshot is on its way


class HolderState(enum.Enum):
    CURRENT = "current"
    NEEDS_SNAPSHOT = "needs_snapshot"


class _Holder:
    """What the index knows of one node."""

    def __init__(self, info: NodeInfo) -> None:
        assert info.block_size % HASH_BLOCK_SIZE == 0
        self.generation = info.generation
        self.stride = info.block_size // HASH_BLOCK_SIZE  # hashes per block of the node
        self.chains = ChainSet()
        self.state = HolderState.NEEDS_SNAPSHOT
        self.sequence = -1  # CURRENT: the last batch applied. Else: the oldest useful snapshot
        self.pending: deque[BlockEventBatch] = deque(maxlen=MAX_PENDING_BATCHES)

    def lose(self, sequence: int) -> None:
        self.state = HolderState.NEEDS_SNAPSHOT
        self.sequence = max(self.sequence, sequence)

    def apply(self, event: BlockEvent) -> None:
        match event:
            case BlockStored(hashes=hashes, parent=parent):
                for block in hashes:
                    self.chains.store(block, parent)
                    parent = block
            case BlockRemoved(hashes=hashes):
                for block in hashes:
                    self.chains.remove(block)
            case CacheCleared():
                self.chains.clear()

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> int:
        """Hashes covered by the longest complete chain of this node: a bisection."""
        ends = range(self.stride, len(hashes) + 1, self.stride)
        num_complete = bisect_left(
            ends, True, key=lambda end: not self.chains.is_complete(hashes[end - 1])
        )
        return num_complete * self.stride


class PrefixIndex:
    """Block hash → holders, for chains.

    At most `max_entries` (holder, block) pairs are kept; beyond, the holder with the most blocks
    loses its oldest ends of chains, counted in `num_evicted`. The index then predicts too few
    hits, never too many.

    Not thread-safe: it belongs to the router's event loop.
    """

    def __init__(self, *, max_entries: int) -> None:
        assert max_entries > 0
        self._max_entries = max_entries
        self._holders: dict[str, _Holder] = {}
        self.num_gaps = 0  # times that a node's batches had a hole
        self.num_evicted = 0  # entries given up for the memory limit

    @property
    def num_entries(self) -> int:
        return sum(len(holder.chains) for holder in self._holders.values())

    def add_node(self, info: NodeInfo) -> None:
        """Follow this node. Harmless when repeated; a new generation starts from nothing."""
        holder = self._holders.get(info.node_id)
        if holder is None or holder.generation != info.generation:
            self._holders[info.node_id] = _Holder(info)

    def remove_node(self, node_id: str) -> None:
        self._holders.pop(node_id, None)

    def needs_snapshot(self) -> frozenset[str]:
        """The nodes whose `Node.snapshot()` should be asked for and given to `apply_snapshot`."""
        return frozenset(
            node_id
            for node_id, holder in self._holders.items()
            if holder.state is HolderState.NEEDS_SNAPSHOT
        )

    def apply(self, batch: BlockEventBatch) -> None:
        """Follow one step of a node. Batches of unknown nodes and repeated ones are ignored."""
        holder = self._holders.get(batch.node_id)
        if holder is None:
            return
        if holder.state is HolderState.NEEDS_SNAPSHOT:
            holder.pending.append(batch)
        elif batch.sequence == holder.sequence + 1:
            holder.sequence = batch.sequence
            for event in batch.events:
                holder.apply(event)
            self._evict()
        elif batch.sequence > holder.sequence:
            self._lose(holder, batch.sequence - 1)
            holder.pending.append(batch)

    def mark_gap(self, node_id: str, sequence: int) -> None:
        """Batches of the node up to `sequence` are lost."""
        holder = self._holders.get(node_id)
        if holder is not None and holder.sequence < sequence:
            self._lose(holder, sequence)

    def apply_snapshot(self, snapshot: CacheSnapshot) -> None:
        """Start afresh from a snapshot, unless it is too old to help or not needed."""
        holder = self._holders.get(snapshot.node_id)
        if holder is None or holder.state is HolderState.CURRENT:
            return
        if snapshot.sequence < holder.sequence:
            return
        holder.chains.clear()
        for block, parent in zip(snapshot.hashes, snapshot.parents, strict=True):
            holder.chains.store(block, parent)
        self._evict()
        holder.state = HolderState.CURRENT
        holder.sequence = snapshot.sequence
        pending = list(holder.pending)
        holder.pending.clear()
        for batch in pending:
            self.apply(batch)

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """How many of the `hashes` of one chain, from its beginning, each holder has.

        Counts are in hashes, whatever the node's block size; nodes that have none are left out.
        O(log n) for each node.
        """
        return {
            node_id: num_hashes
            for node_id, holder in self._holders.items()
            if (num_hashes := holder.longest_prefix(hashes))
        }

    def check_integrity(self) -> None:
        """Assert what must hold at any time."""
        assert self.num_entries <= self._max_entries
        for holder in self._holders.values():
            holder.chains.check_integrity()
            assert holder.state is HolderState.NEEDS_SNAPSHOT or not holder.pending

    def _lose(self, holder: _Holder, sequence: int) -> None:
        self.num_gaps += holder.state is HolderState.CURRENT
        holder.lose(sequence)

    def _evict(self) -> None:
        for _ in range(self.num_entries - self._max_entries):
            largest = max(self._holders.values(), key=lambda holder: len(holder.chains))
            largest.chains.remove_oldest_leaf()
            self.num_evicted += 1
