from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol import (
    BlockEvent,
    BlockEventBatch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    CacheSnapshot,
    hash_chain,
)
from router import PrefixIndex
from tests.router.nodes import make_info

# Chains of 12 hashes that part after 4 and after 8.
TOKENS = [
    [branch if position >= 16 * 4 * branch else 0 for position in range(192)] for branch in range(3)
]
CHAINS = [hash_chain(token_ids) for token_ids in TOKENS]
STRIDES = {"n0": 1, "n1": 2, "n2": 4}  # hashes per block of the node


class FakeCache:
    """A node's prefix cache: a set of blocks, with the events that it sends."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.stride = STRIDES[node_id]
        self.held: dict[BlockHash, BlockHash | None] = {}  # → parent
        self.sequence = -1

    def chain(self, branch: int) -> list[BlockHash]:
        return CHAINS[branch][self.stride - 1 :: self.stride]

    def store(self, branch: int, start: int, end: int) -> BlockEventBatch:
        chain = self.chain(branch)
        start, end = start // self.stride, end // self.stride
        parent = chain[start - 1] if start else None
        event = BlockStored(tuple(chain[start:end]), parent)
        self.held |= {
            block: chain[index - 1] if index else None
            for index, block in enumerate(chain[:end])
            if index >= start
        }
        return self.emit(event)

    def remove(self, branch: int, start: int, end: int) -> BlockEventBatch:
        gone = self.chain(branch)[start // self.stride : end // self.stride]
        for block in gone:
            self.held.pop(block, None)
        return self.emit(BlockRemoved(tuple(gone)))

    def clear(self) -> BlockEventBatch:
        self.held.clear()
        return self.emit(CacheCleared())

    def emit(self, *events: BlockEvent) -> BlockEventBatch:
        self.sequence += 1
        return BlockEventBatch(self.node_id, self.sequence, events)

    def snapshot(self) -> CacheSnapshot:
        # Any order: a set has none.
        blocks = sorted(self.held)
        parents = tuple(self.held[block] for block in blocks)
        return CacheSnapshot(self.node_id, self.sequence, tuple(blocks), parents)

    def longest_prefix(self, hashes: list[BlockHash]) -> int:
        """The slow and obvious way: walk from the beginning until a block is missing."""
        count = 0
        while count + self.stride <= len(hashes) and hashes[count + self.stride - 1] in self.held:
            count += self.stride
        return count


def follow(node_id: str = "n0", *, max_entries: int = 1000) -> tuple[PrefixIndex, FakeCache]:
    """An index that follows an empty cache."""
    index, cache = PrefixIndex(max_entries=max_entries), FakeCache(node_id)
    index.add_node(make_info(node_id, block_size=16 * STRIDES[node_id]))
    index.apply_snapshot(cache.snapshot())
    return index, cache


NODES = st.sampled_from(sorted(STRIDES))
BRANCHES = st.integers(0, 2)
BOUNDS = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


class IndexFollowsCaches(RuleBasedStateMachine):
    """Random caches, a link that loses, repeats and delays, against caches that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_entries=10_000)
        self.caches = {node_id: FakeCache(node_id) for node_id in STRIDES}
        self.generation = 0
        self.behind: set[str] = set()  # a batch was lost and none has come since
        self.snapshots: list[CacheSnapshot] = []  # under way
        for node_id, stride in STRIDES.items():
            self.index.add_node(make_info(node_id, block_size=16 * stride))
            self.index.apply_snapshot(self.caches[node_id].snapshot())

    def send(self, batch: BlockEventBatch, fate: str) -> None:
        if fate == "lost":
            self.behind.add(batch.node_id)
            return
        self.behind.discard(batch.node_id)
        for _ in range(2 if fate == "twice" else 1):
            self.index.apply(batch)

    FATES = st.sampled_from(["once", "once", "once", "twice", "lost"])

    @rule(node_id=NODES, branch=BRANCHES, bounds=BOUNDS, fate=FATES)
    def store(self, node_id: str, branch: int, bounds: list[int], fate: str) -> None:
        self.send(self.caches[node_id].store(branch, *bounds), fate)

    @rule(node_id=NODES, branch=BRANCHES, bounds=BOUNDS, fate=FATES)
    def remove(self, node_id: str, branch: int, bounds: list[int], fate: str) -> None:
        self.send(self.caches[node_id].remove(branch, *bounds), fate)

    @rule(node_id=NODES, fate=FATES)
    def clear(self, node_id: str, fate: str) -> None:
        self.send(self.caches[node_id].clear(), fate)

    @rule(node_id=NODES)
    def take_snapshot(self, node_id: str) -> None:
        self.snapshots.append(self.caches[node_id].snapshot())

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def deliver_snapshot(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.snapshots) - 1))
        self.index.apply_snapshot(self.snapshots.pop(place))

    @rule(node_id=NODES)
    def report_gap(self, node_id: str) -> None:
        if node_id in self.behind:
            self.index.mark_gap(node_id, self.caches[node_id].sequence)
            self.behind.discard(node_id)

    @rule(node_id=NODES)
    def restart(self, node_id: str) -> None:
        self.generation += 1
        self.snapshots = [s for s in self.snapshots if s.node_id != node_id]
        self.caches[node_id] = FakeCache(node_id)
        self.behind.discard(node_id)
        info = make_info(node_id, block_size=16 * STRIDES[node_id], generation=self.generation)
        self.index.add_node(info)
        assert node_id in self.index.needs_snapshot()

    @invariant()
    def holds_together(self) -> None:
        self.index.check_integrity()

    @invariant()
    def agrees_with_every_cache_that_it_is_up_to_date_with(self) -> None:
        up_to_date = STRIDES.keys() - self.index.needs_snapshot() - self.behind
        for chain in CHAINS:
            found = self.index.longest_prefix(chain)
            for node_id in up_to_date:
                assert found.get(node_id, 0) == self.caches[node_id].longest_prefix(chain)

    def teardown(self) -> None:
        """A snapshot of now always helps."""
        for node_id, cache in self.caches.items():
            self.index.mark_gap(node_id, cache.sequence)
            self.index.apply_snapshot(cache.snapshot())
            self.behind.discard(node_id)
        assert not self.index.needs_snapshot()
        self.agrees_with_every_cache_that_it_is_up_to_date_with()


IndexFollowsCaches.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestIndexFollowsCaches = IndexFollowsCaches.TestCase


@pytest.mark.parametrize(("node_id", "expected"), [("n0", 7), ("n1", 6), ("n2", 4)])
def test_a_node_with_larger_blocks_is_asked_for_its_own(node_id: str, expected: int) -> None:
    index, cache = follow(node_id)
    index.apply(cache.store(0, 0, 12))
    assert index.longest_prefix(CHAINS[0][:7]) == {node_id: expected}
    assert index.longest_prefix(CHAINS[0]) == {node_id: 12}


def test_chains_that_part_share_their_beginning() -> None:
    index, cache = follow()
    index.apply(cache.store(1, 0, 12))
    assert [index.longest_prefix(chain) for chain in CHAINS] == [{"n0": 4}, {"n0": 12}, {"n0": 4}]


def test_nodes_without_a_hit_are_left_out() -> None:
    index, _ = follow()
    assert index.longest_prefix(CHAINS[0]) == {}
    assert index.longest_prefix([]) == {}


def test_a_look_up_bisects() -> None:
    index, cache = follow(max_entries=5000)
    token_ids = list(range(16 * 4096))
    chain = hash_chain(token_ids)
    index.apply(cache.emit(BlockStored(tuple(chain[:3000]), None)))

    class Counted(list[BlockHash]):
        reads = 0

        def __getitem__(self, place: object) -> BlockHash:  # type: ignore[override]
            Counted.reads += 1
            return super().__getitem__(place)  # type: ignore[call-overload]

    assert index.longest_prefix(Counted(chain)) == {"n0": 3000}
    assert Counted.reads <= 13


def test_a_new_node_needs_a_snapshot_and_keeps_what_comes_meanwhile() -> None:
    index, cache = PrefixIndex(max_entries=1000), FakeCache("n0")
    cache.store(0, 0, 2)
    index.add_node(make_info("n0"))
    index.apply(cache.store(0, 2, 3))
    snapshot = cache.snapshot()
    index.apply(cache.store(0, 3, 5))
    assert index.needs_snapshot() == {"n0"}
    index.apply_snapshot(snapshot)
    assert index.needs_snapshot() == frozenset()
    assert index.longest_prefix(CHAINS[0]) == {"n0": 5}


def test_a_gap_asks_for_a_snapshot_that_is_not_older() -> None:
    index, cache = follow()
    index.apply(cache.store(0, 0, 2))
    too_old = cache.snapshot()
    cache.store(0, 2, 4)  # lost
    index.apply(cache.store(0, 4, 6))
    assert index.needs_snapshot() == {"n0"}
    assert index.num_gaps == 1
    assert index.longest_prefix(CHAINS[0]) == {"n0": 2}  # the last that is known
    index.apply_snapshot(too_old)
    assert index.needs_snapshot() == {"n0"}
    index.apply_snapshot(cache.snapshot())
    assert index.longest_prefix(CHAINS[0]) == {"n0": 6}


def test_a_gap_behind_the_last_batch_is_told_by_the_directory() -> None:
    index, cache = follow()
    lost = cache.store(0, 0, 2)
    index.mark_gap("n0", lost.sequence)
    assert index.needs_snapshot() == {"n0"}
    index.apply_snapshot(cache.snapshot())
    index.mark_gap("n0", lost.sequence)  # known by now
    assert index.needs_snapshot() == frozenset()


def test_an_unknown_node_is_ignored_and_a_removed_one_forgotten() -> None:
    index, cache = follow()
    index.apply(cache.store(0, 0, 4))
    index.remove_node("n0")
    index.remove_node("n0")
    index.apply(cache.store(0, 4, 6))
    index.apply_snapshot(cache.snapshot())
    index.mark_gap("n0", 99)
    assert index.longest_prefix(CHAINS[0]) == {}
    assert index.num_entries == 0


def test_adding_a_node_again_changes_nothing_until_it_restarts() -> None:
    index, cache = follow()
    index.apply(cache.store(0, 0, 4))
    index.add_node(make_info("n0"))
    assert index.longest_prefix(CHAINS[0]) == {"n0": 4}
    index.add_node(make_info("n0", generation=1))
    assert index.longest_prefix(CHAINS[0]) == {}
    assert index.needs_snapshot() == {"n0"}


@given(
    limit=st.integers(1, 12),
    stores=st.lists(st.tuples(NODES, BRANCHES, st.integers(1, 12)), max_size=20),
)
def test_memory_is_bounded_and_hits_are_never_overrated(
    limit: int, stores: list[tuple[str, int, int]]
) -> None:
    index = PrefixIndex(max_entries=limit)
    caches = {node_id: FakeCache(node_id) for node_id in STRIDES}
    for node_id, cache in caches.items():
        index.add_node(make_info(node_id, block_size=16 * cache.stride))
        index.apply_snapshot(cache.snapshot())
    for node_id, branch, end in stores:
        index.apply(caches[node_id].store(branch, 0, end))
        index.check_integrity()
        for chain in CHAINS:
            for holder, found in index.longest_prefix(chain).items():
                assert found <= caches[holder].longest_prefix(chain)
    num_held = sum(len(cache.held) for cache in caches.values())
    assert index.num_evicted >= num_held - index.num_entries
    assert (index.num_evicted > 0) == (num_held > limit)


def test_eviction_keeps_the_shared_beginning() -> None:
    index, cache = follow(max_entries=10)
    for branch in (0, 1, 2):
        index.apply(cache.store(branch, 0, 12))
    assert index.num_entries == 10
    assert all(index.longest_prefix(chain)["n0"] >= 4 for chain in CHAINS)


def test_a_snapshot_larger_than_the_memory_is_cut() -> None:
    index, cache = follow(max_entries=5)
    cache.store(0, 0, 12)
    index.mark_gap("n0", cache.sequence)
    index.apply_snapshot(cache.snapshot())
    assert index.longest_prefix(CHAINS[0]) == {"n0": 5}
    assert index.num_evicted == 7
