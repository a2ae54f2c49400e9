"""Blocks and block tables against an oracle that knows no hashes and scans everything.

The oracle names what a block holds by the tokens themselves: all of them up to the block's end,
with the adapter and the salt. Unused blocks stand in one plain list, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protocol import BlockRemoved, BlockStored, CacheCleared, SamplingParams
from scheduler import CacheConfig, Request
from scheduler.block_pool import BlockPool
from scheduler.kv_cache_manager import KVCacheManager

HASH_BLOCK = 2  # tokens
NUM_BLOCKS = 8  # usable ones
MAX_LEN = 24

Prefix = tuple[object, ...]  # adapter, salt, then all tokens


@dataclass
class Oracle:
    """Who holds which block, and what each block is known to hold."""

    block_size: int
    tables: dict[Request, list[int]] = field(default_factory=dict)
    cached: dict[Request, int] = field(default_factory=dict)  # blocks of it that can be hit
    unused: list[int] = field(default_factory=lambda: list(range(1, NUM_BLOCKS + 1)))
    holds: dict[int, Prefix] = field(default_factory=dict)  # what can be hit; oldest first

    def prefix(self, request: Request, num_blocks: int) -> Prefix:
        tokens = request.all_token_ids[: num_blocks * self.block_size]
        return (request.lora_name, request.cache_salt, *tokens)

    def find(self, request: Request, *, drop_last: bool = False) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * self.block_size < request.num_tokens:
            wanted = self.prefix(request, len(found) + 1)
            block_id = next((b for b, held in self.holds.items() if held == wanted), None)
            if block_id is None:
                break
            found.append(block_id)
        return found[:-1] if drop_last else found

    def take(self, count: int) -> list[int]:
        taken, self.unused = self.unused[:count], self.unused[count:]
        for block_id in taken:
            self.holds.pop(block_id, None)
        return taken

    def remember(self, request: Request, num_tokens: int) -> None:
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        for number in range(self.cached[request], num_full):
            block_id = self.tables[request][number]
            self.holds.setdefault(block_id, self.prefix(request, number + 1))
        self.cached[request] = max(self.cached[request], num_full)

    def forget(self, request: Request, num_tokens: int) -> None:
        num_left = min(num_tokens // self.block_size, self.cached[request])
        for block_id in self.tables[request][num_left : self.cached[request]]:
            self.holds.pop(block_id, None)
        self.cached[request] = num_left

    def free(self, request: Request) -> None:
        for block_id in reversed(self.tables.pop(request)):
            if not any(block_id in table for table in self.tables.values()):
                self.unused.append(block_id)
        del self.cached[request]


class BlockTables(RuleBasedStateMachine):
    """Requests come, grow, share, and go."""

    @initialize(pieces=st.integers(1, 3), eagle=st.booleans(), caching=st.sampled_from([1, 1, 0]))
    def start(self, pieces: int, eagle: bool, caching: int) -> None:
        config = CacheConfig(
            num_blocks=NUM_BLOCKS + 1,
            block_size=pieces * HASH_BLOCK,
            hash_block_size=HASH_BLOCK,
            enable_prefix_caching=bool(caching),
        )
        self.caching = bool(caching)
        self.eagle = eagle
        self.kv = KVCacheManager(config, MAX_LEN, drop_last_hit=eagle)
        self.pool: BlockPool = self.kv.pool
        self.oracle = Oracle(config.block_size)
        self.known: dict[bytes, bytes | None] = {}  # to somebody who hears of all changes
        self.seen: list[Request] = []  # those that are gone, too
        self.num_hit: dict[Request, int] = {}  # tokens that each found in the cache
        self.has_taken_back = False

    def _one(self, number: int) -> Request:
        requests = list(self.oracle.tables)
        return requests[number % len(requests)]

    @property
    def _any(self) -> bool:
        return bool(self.oracle.tables)

    # ------------------------------------------------------------------ rules

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN),
        lora=st.sampled_from([None, None, None, "x"]),
        salt=st.sampled_from([None, None, None, "x"]),
        share=st.integers(0, 3),
        num_new=st.integers(0, 12),
        lookahead=st.integers(0, 3),
        external=st.integers(0, 5),
        whole=st.booleans(),
        delay=st.booleans(),
    )
    def admit(
        self,
        tokens: list[int],
        lora: str | None,
        salt: str | None,
        share: int,
        num_new: int,
        lookahead: int,
        external: int,
        whole: bool,
        delay: bool,
    ) -> None:
        if share and self.seen:  # most prompts begin like an earlier one
            older = self.seen[-share % len(self.seen)]
            tokens = [*older.all_token_ids[: len(tokens)], *tokens][:MAX_LEN]
            lora, salt = older.lora_name, older.cache_salt
        request = Request(
            f"r{len(self.seen)}",
            tokens,
            SamplingParams(),
            lora_name=lora,
            cache_salt=salt,
            hash_block_size=HASH_BLOCK,
        )
        self.seen.append(request)
        prefix = self.kv.find_prefix(request)
        wanted = self.oracle.find(request, drop_last=self.eagle) if self.caching else []
        assert list(prefix) == wanted
        assert len(prefix) * self.oracle.block_size < request.num_tokens
        num_local = len(prefix) * self.oracle.block_size
        external = min(external, request.num_tokens - num_local)
        num_new = min(num_new, request.num_tokens - num_local - external)
        done = self.kv.allocate_slots(
            request,
            num_new,
            prefix=prefix,
            num_external_tokens=external,
            num_lookahead_tokens=lookahead,
            whole_must_fit=whole,
            delay_caching=delay,
        )
        num_tokens = num_local + external + num_new
        num_slots = min(num_tokens + lookahead, MAX_LEN)
        num_wanted = max(0, self.kv.blocks_for(num_slots) - len(prefix))
        num_whole = self.kv.blocks_for(request.num_tokens) - len(prefix)
        oracle = self.oracle
        others = [b for b in oracle.unused if b not in prefix]
        fits = len(others) >= (max(num_wanted, num_whole) if whole else num_wanted)
        assert done == fits
        if not done:
            assert not request.block_ids
            return
        oracle.unused = others
        oracle.tables[request] = [*prefix, *oracle.take(num_wanted)]
        oracle.cached[request] = len(prefix)
        self.num_hit[request] = num_local
        request.num_computed_tokens = num_tokens
        if not delay:
            self._note(request, num_tokens)

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 20), num_new=st.integers(1, 6), lookahead=st.integers(0, 4))
    def grow(self, number: int, num_new: int, lookahead: int) -> None:
        request = self._one(number)
        num_tokens = min(request.num_computed_tokens + num_new, MAX_LEN)
        num_new = num_tokens - request.num_computed_tokens
        num_slots = min(num_tokens + lookahead, MAX_LEN)
        num_wanted = max(0, self.kv.blocks_for(num_slots) - len(request.block_ids))
        before = list(request.block_ids)
        fresh = self.kv.append_slots(request, num_new, lookahead)
        if num_wanted > len(self.oracle.unused):
            assert fresh is None
            assert request.block_ids == before
            return
        wanted = self.oracle.take(num_wanted)
        assert list(fresh or ()) == wanted
        self.oracle.tables[request] += wanted
        request.num_computed_tokens = num_tokens
        self._note(request, num_tokens)

    def _note(self, request: Request, num_tokens: int) -> None:
        if self.caching:
            self.oracle.remember(request, num_tokens)

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 20), token=st.integers(0, 1))
    def sample(self, number: int, token: int) -> None:
        request = self._one(number)
        if request.num_tokens < MAX_LEN:
            request.append_output(token)

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 20))
    def cache_what_is_computed(self, number: int) -> None:
        request = self._one(number)
        self.kv.cache_blocks(request, request.num_computed_tokens)
        self._note(request, request.num_computed_tokens)

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 20), num_less=st.integers(0, 8))
    def take_back_the_end(self, number: int, num_less: int) -> None:
        """As after a preemption, of what nobody else has hit yet.

        What the request has hit itself was computed before, and is never taken back.
        """
        request = self._one(number)
        num_left = max(self.num_hit[request], request.num_computed_tokens - num_less)
        if self.kv.uncomputed_are_shared(request, num_left):
            return
        self.kv.forget_uncomputed(request, num_left)
        self.oracle.forget(request, num_left)
        request.num_computed_tokens = num_left
        self.has_taken_back = True

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 20))
    def free(self, number: int) -> None:
        request = self._one(number)
        self.kv.free(request)
        self.oracle.free(request)
        assert (request.block_ids, request.num_hashed_blocks) == ([], 0)

    @precondition(lambda self: not self._any)
    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.oracle.holds.clear()

    @rule(block_ids=st.lists(st.integers(1, NUM_BLOCKS), max_size=2))
    def room_if_some_were_gone(self, block_ids: list[int]) -> None:
        without = [r for r in self.oracle.tables if set(block_ids) & set(r.block_ids)]
        left = [table for r, table in self.oracle.tables.items() if r not in without]
        prefix = list(dict.fromkeys(block_ids))
        room = [b for b in range(1, NUM_BLOCKS + 1) if not any(b in table for table in left)]
        assert self.kv.room_without(without, prefix) == len(set(room) - set(prefix))

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def the_same_as_the_oracle(self) -> None:
        if not hasattr(self, "kv"):
            return
        oracle, pool = self.oracle, self.pool
        pool.check(request.block_ids for request in oracle.tables)
        for request, table in oracle.tables.items():
            assert request.block_ids == table
            assert request.num_hashed_blocks == oracle.cached[request]
        assert list(pool._unused) == oracle.unused
        num_cached = sum(block_id in oracle.holds for block_id in oracle.unused)
        assert (pool.num_cached, pool.num_unused) == (num_cached, len(oracle.unused))
        assert (pool.num_free, pool.num_used) == (
            len(oracle.unused) - num_cached,
            NUM_BLOCKS - len(oracle.unused),
        )

    @invariant()
    def whoever_hears_of_all_changes_knows_what_can_be_hit(self) -> None:
        if not hasattr(self, "kv"):
            return
        for event in self.pool.take_events():
            match event:
                case BlockStored(hashes, parent):
                    for block_hash in hashes:
                        assert block_hash not in self.known
                        self.known[block_hash], parent = parent, block_hash
                case BlockRemoved(hashes):
                    for block_hash in hashes:
                        del self.known[block_hash]
                case CacheCleared():
                    self.known.clear()
        assert self.known == dict(self.pool.cached_chain())
        assert len(self.known) == len(set(self.oracle.holds.values()))
        # Who takes a block back may leave one behind that another request has made to follow it: it
        # can be hit again once the block in front of it is there.
        parents = {parent for parent in self.known.values() if parent is not None}
        assert self.has_taken_back or parents <= self.known.keys()


def test_block_tables() -> None:
    run_state_machine_as_test(
        BlockTables,
        settings=settings(
            max_examples=300, stateful_step_count=50, deadline=None, derandomize=True
        ),
    )


# ---------------------------------------------------------------------- chosen cases


def make_pool(num_blocks: int = 6) -> BlockPool:
    return BlockPool(num_blocks + 1)


def stored(pool: BlockPool) -> list[tuple[Sequence[bytes], bytes | None]]:
    events = pool.take_events()
    return [(e.hashes, e.parent) for e in events if isinstance(e, BlockStored)]


def test_a_block_in_the_middle_that_is_cached_already_parts_the_news() -> None:
    pool = make_pool()
    blocks = pool.take(3)
    pool.remember(blocks[1:2], [b"b"], b"a")
    assert stored(pool) == [((b"b",), b"a")]
    pool.remember(blocks, [b"a", b"b", b"c"], None)
    assert stored(pool) == [((b"a",), None), ((b"c",), b"b")]


def test_a_duplicate_takes_the_place_of_the_one_that_was_hit() -> None:
    pool = make_pool(2)
    first, second = pool.take(2)
    pool.remember([first], [b"a"], None)
    pool.remember([second], [b"a"], None)
    assert pool.find_chain([b"a"]) == [first]
    pool.release([first])
    assert pool.take(1) == [first]
    assert pool.find_chain([b"a"]) == [second]
    assert [type(event) for event in pool.take_events()] == [BlockStored]
    pool.release([second])
    pool.take(1)
    assert pool.take_events() == [BlockRemoved((b"a",))]


def test_of_several_duplicates_the_oldest_is_hit() -> None:
    pool = make_pool(3)
    blocks = pool.take(3)
    for block_id in blocks:
        pool.remember([block_id], [b"a"], None)
    pool.forget(blocks[0])
    assert pool.find_chain([b"a"]) == [blocks[1]]


def test_a_prefix_that_nobody_uses_is_no_room_for_what_follows_it() -> None:
    kv = KVCacheManager(CacheConfig(num_blocks=4, block_size=2, hash_block_size=2), MAX_LEN)

    def one(name: str, num_tokens: int) -> Request:
        return Request(name, range(num_tokens), SamplingParams(), hash_block_size=2)

    first, second, third = one("a", 4), one("b", 8), one("c", 6)
    assert kv.allocate_slots(first, 4)
    kv.free(first)
    prefix = kv.find_prefix(second)
    assert len(prefix) == 2
    assert not kv.allocate_slots(second, 4, prefix=prefix)  # one block is left for two
    assert kv.allocate_slots(third, 2, prefix=prefix)
    assert third.block_ids[:2] == list(prefix)


def test_the_end_of_a_prefix_is_evicted_before_its_root() -> None:
    pool = make_pool(3)
    blocks = pool.take(3)
    pool.remember(blocks, [b"a", b"b", b"c"], None)
    pool.release(reversed(blocks))
    for left in ([b"a", b"b"], [b"a"], []):
        pool.take(1)
        assert pool.find_chain([b"a", b"b", b"c"]) == blocks[: len(left)]


def test_only_unused_ones_are_forgotten_with_forget_unused() -> None:
    pool = make_pool(3)
    blocks = pool.take(3)
    pool.remember(blocks, [b"a", b"b", b"c"], None)
    pool.release([blocks[2], blocks[1]])
    pool.forget_unused(blocks)
    assert pool.find_chain([b"a", b"b", b"c"]) == blocks[:1]
    assert (pool.num_cached, pool.num_free, pool.num_used) == (0, 2, 1)
    pool.check([blocks[:1]])
