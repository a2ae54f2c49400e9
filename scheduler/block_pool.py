"""Who holds which block, and which blocks can be hit.

Each usable block is in exactly one of these states:

    used    ref_cnt > 0: in the table of one request, or of several that share a prefix
    cached  ref_cnt = 0, has a hash: can be hit, and is evicted when handed out again
    free    ref_cnt = 0, no hash

Blocks without a user are in one list, least recently freed first; handing out takes from its
front. All operations are O(1) amortised for each block touched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from protocol import BlockEvent, BlockHash, BlockRemoved, BlockStored, CacheCleared

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 to `num_blocks` - 1. Block 0 is the null block and is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self._ref_cnt = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._parent_of: list[BlockHash | None] = [None] * num_blocks
        # Equal blocks are not merged: a table never changes under a request that runs. The one that
        # has been cached for the longest time is the one that is hit; the others stand behind it.
        self._cached: dict[BlockHash, int] = {}
        self._duplicates: dict[BlockHash, dict[int, None]] = {}
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_unused_cached = 0
        self._events: list[BlockEvent] = []

    @property
    def num_unused(self) -> int:
        """Blocks that could be handed out now: free and cached ones."""
        return len(self._unused)

    @property
    def num_cached(self) -> int:
        """Blocks without a user that can be hit."""
        return self._num_unused_cached

    @property
    def num_free(self) -> int:
        return len(self._unused) - self._num_unused_cached

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._unused)

    def find_chain(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks with these contents, up to the first that is not cached."""
        found = []
        for block_id in map(self._cached.get, hashes):
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_unused(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks have no user."""
        ref_cnt = self._ref_cnt
        return sum([not ref_cnt[block_id] for block_id in block_ids])

    def count_users(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks (at most `num_unused`); what they cached is forgotten."""
        assert count <= len(self._unused), (count, len(self._unused))
        taken = []
        for _ in range(count):
            block_id, _nothing = self._unused.popitem(last=False)
            if self._hash_of[block_id] is not None:
                self._num_unused_cached -= 1
                self.forget(block_id)
            self._ref_cnt[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """One more user for each of these cached blocks."""
        ref_cnt = self._ref_cnt
        for block_id in block_ids:
            num_users = ref_cnt[block_id]
            if num_users == 0:
                del self._unused[block_id]
                self._num_unused_cached -= 1
            ref_cnt[block_id] = num_users + 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One user less for each; those without a user go to the end of the list, in this order."""
        ref_cnt = self._ref_cnt
        for block_id in block_ids:
            ref_cnt[block_id] -= 1
            assert ref_cnt[block_id] >= 0, f"block {block_id} was freed twice"
            if ref_cnt[block_id] == 0:
                self._unused[block_id] = None
                self._num_unused_cached += self._hash_of[block_id] is not None

    def remember(
        self, block_ids: Sequence[int], hashes: Sequence[BlockHash], parent: BlockHash | None
    ) -> None:
        """These used, full blocks follow each other and can be hit from now on."""
        stored_from = parent
        stored: list[BlockHash] = []  # follow each other, and nobody had them before
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            known = self._hash_of[block_id]
            assert known in (None, block_hash), f"block {block_id} has another hash already"
            if known is None and block_hash not in self._cached:
                self._cached[block_hash] = block_id
                stored_from = stored_from if stored else parent
                stored.append(block_hash)
            else:
                if known is None:  # else it is shared, and its other user was first
                    self._duplicates.setdefault(block_hash, {})[block_id] = None
                if stored:
                    self._events.append(BlockStored(tuple(stored), stored_from))
                    stored = []
            if known is None:
                self._hash_of[block_id] = block_hash
                self._parent_of[block_id] = parent
            parent = block_hash
        if stored:
            self._events.append(BlockStored(tuple(stored), stored_from))

    def forget(self, block_id: int) -> None:
        """This block can be hit no longer. It must not be in the list of unused blocks."""
        block_hash = self._hash_of[block_id]
        if block_hash is None:
            return
        self._hash_of[block_id] = self._parent_of[block_id] = None
        duplicates = self._duplicates.get(block_hash)
        if self._cached[block_hash] != block_id:
            assert duplicates is not None
            del duplicates[block_id]
        elif duplicates:
            self._cached[block_hash] = next(iter(duplicates))
            del duplicates[self._cached[block_hash]]
        else:
            del self._cached[block_hash]
            self._events.append(BlockRemoved((block_hash,)))
        if duplicates is not None and not duplicates:
            del self._duplicates[block_hash]

    def forget_unused(self, block_ids: Iterable[int]) -> None:
        """Those of these blocks that nobody uses can be hit no longer."""
        for block_id in block_ids:
            if not self._ref_cnt[block_id] and self._hash_of[block_id] is not None:
                self._num_unused_cached -= 1
                self.forget(block_id)

    def forget_all(self) -> None:
        """Nothing can be hit any more. No block may be in use."""
        assert self.num_used == 0
        self._hash_of = [None] * len(self._hash_of)
        self._parent_of = [None] * len(self._parent_of)
        self._cached.clear()
        self._duplicates.clear()
        self._num_unused_cached = 0
        self._events.append(CacheCleared())

    def cached_chain(self) -> list[tuple[BlockHash, BlockHash | None]]:
        """(hash, parent hash) of everything that can be hit; parents may come after children."""
        return [
            (block_hash, self._parent_of[block_id]) for block_hash, block_id in self._cached.items()
        ]

    def take_events(self) -> list[BlockEvent]:
        """What changed in the cache since the last call."""
        events, self._events = self._events, []
        return events

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that counts, lists and the given block tables (all there are) agree."""
        users = [0] * len(self._ref_cnt)
        for table in tables:
            for block_id in table:
                users[block_id] += 1
        assert users == self._ref_cnt, "reference counts differ from the block tables"
        assert self._ref_cnt[NULL_BLOCK] == 0, "the null block is in use"
        unused = {b for b in range(1, len(users)) if users[b] == 0}
        assert unused == set(self._unused), "the list of unused blocks is wrong"
        cached = sum(self._hash_of[b] is not None for b in unused)
        assert cached == self._num_unused_cached, "the count of cached blocks is wrong"
        holders = {block: h for h, block in self._cached.items()}
        holders |= {block: h for h, blocks in self._duplicates.items() for block in blocks}
        assert holders == {b: h for b, h in enumerate(self._hash_of) if h is not None}
        assert all(h in self._cached and self._duplicates[h] for h in self._duplicates)
