"""Block tables: which blocks hold the KV of which request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from protocol import BlockHash
from scheduler.block_pool import BlockPool
from scheduler.config import CacheConfig
from scheduler.request import Request


class KVCacheManager:
    """Gives blocks to requests, finds cached prefixes, and takes blocks back.

    The blocks of a request while it is given `num_new_tokens` more:

        | computed before | prefix hit  | loaded        | new tokens | lookahead |
        |  in its table   | shared here | new blocks, to be filled               |
        0                               ^               ^                        ^
                      local computed ───┘   total computed            slots needed

    `drop_last_hit`: the draft model of EAGLE needs hidden states of the last block that is hit, so
    that one is computed again.
    """

    def __init__(self, config: CacheConfig, max_len: int, *, drop_last_hit: bool = False) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._max_len = max_len
        self._block_size = config.block_size
        self._hashes_per_block = config.block_size // config.hash_block_size
        self._caching = config.enable_prefix_caching
        self._drop_last_hit = drop_last_hit

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold the beginning of the request.

        At most `num_tokens` - 1 tokens, because the last one has to be computed to get logits.
        """
        if not self._caching:
            return []
        num_full = (request.num_tokens - 1) // self._block_size
        found = self.pool.find_chain(self._block_hashes(request, 0, num_full))
        if self._drop_last_hit and found:
            found.pop()
        return found

    def append_slots(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> Sequence[int] | None:
        """Blocks for `num_new_tokens` more of a running request, and for what may follow them.

        Returns the blocks that are new, or None and changes nothing if the pool has too few.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_slots = min(num_tokens + num_lookahead_tokens, self._max_len)
        num_missing = self.blocks_for(num_slots) - len(request.block_ids)
        fresh: Sequence[int] = ()
        if num_missing > 0:
            if num_missing > self.pool.num_unused:
                return None
            fresh = self.pool.take(num_missing)
            request.block_ids.extend(fresh)
        self.cache_blocks(request, num_tokens)
        return fresh

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        prefix: Sequence[int] = (),
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        whole_must_fit: bool = False,
        delay_caching: bool = False,
    ) -> bool:
        """Give a waiting request its prefix hit, room for what is loaded, and for new tokens.

        Returns False and changes nothing if the pool has too few blocks. With `whole_must_fit` the
        whole request must fit, though only these tokens are given blocks. With `delay_caching` the
        blocks cannot be hit until `cache_blocks`, because what they will hold is still on its way.
        """
        num_local = request.num_computed_tokens + len(prefix) * self._block_size
        num_tokens = num_local + num_external_tokens + num_new_tokens
        num_slots = min(num_tokens + num_lookahead_tokens, self._max_len)
        num_held = len(request.block_ids) + len(prefix)
        num_fresh = max(0, self.blocks_for(num_slots) - num_held)
        num_needed = num_fresh
        if whole_must_fit:
            whole = min(max(request.num_tokens, num_tokens), self._max_len)
            num_needed = max(num_fresh, self.blocks_for(whole) - num_held)
        if not self._has_room(num_needed, prefix):
            return False
        if prefix:
            self.pool.share(prefix)
            request.block_ids.extend(prefix)
            request.num_hashed_blocks = len(prefix)
        request.block_ids.extend(self.pool.take(num_fresh))
        if not delay_caching:
            self.cache_blocks(request, num_tokens)
        return True

    def _has_room(self, num_blocks: int, prefix: Sequence[int]) -> bool:
        """Whether so many blocks can be handed out beside those of the prefix that nobody uses."""
        room = self.pool.num_unused - num_blocks
        return room >= len(prefix) or room >= self.pool.count_unused(prefix)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """The full blocks among the first `num_tokens` of the request can be hit from now on.

        Drafts, and tokens that nobody knows yet, are no part of what can be hit.
        """
        if not self._caching:
            return
        num_full = min(num_tokens, len(request.all_token_ids)) // self._block_size
        num_hashed = request.num_hashed_blocks
        if num_full <= num_hashed:
            return
        hashes = self._block_hashes(request, num_hashed, num_full)
        parent = self._block_hashes(request, num_hashed - 1, num_hashed) if num_hashed else None
        self.pool.remember(
            request.block_ids[num_hashed:num_full], hashes, parent[0] if parent else None
        )
        request.num_hashed_blocks = num_full

    def forget_uncomputed(self, request: Request, num_computed_tokens: int) -> None:
        """Take back the hashes of blocks that hold, or will hold, something else than was said."""
        num_valid = min(num_computed_tokens // self._block_size, request.num_hashed_blocks)
        for block_id in request.block_ids[num_valid : request.num_hashed_blocks]:
            self.pool.forget(block_id)
        request.num_hashed_blocks = num_valid

    def uncomputed_are_shared(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether another request has hit blocks that this one has yet to compute."""
        num_valid = num_computed_tokens // self._block_size
        hittable = request.block_ids[num_valid : request.num_hashed_blocks]
        return any(self.pool.count_users(block_id) > 1 for block_id in hittable)

    def room_without(self, requests: Iterable[Request], prefix: Sequence[int]) -> int:
        """Blocks for somebody who hits `prefix`, if all of these requests lost theirs."""
        users = Counter(block_id for request in requests for block_id in request.block_ids)
        kept = set(prefix)
        freed = sum(
            self.pool.count_users(block_id) == count
            for block_id, count in users.items()
            if block_id not in kept
        )
        return self.pool.num_unused - self.pool.count_unused(prefix) + freed

    def free(self, request: Request) -> None:
        """Take the blocks back. The end of a prefix is to be evicted before its root."""
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_hashed_blocks = 0

    def _block_hashes(self, request: Request, start: int, end: int) -> Sequence[BlockHash]:
        """Of the blocks from number `start` to `end`, which must be full."""
        step = self._hashes_per_block
        return request.block_hashes[(start + 1) * step - 1 : end * step : step]
