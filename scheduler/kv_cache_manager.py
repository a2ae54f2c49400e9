"""Block tables: which blocks hold the KV of which request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol import BlockHash
from scheduler.block_pool import BlockPool
from scheduler.config import CacheConfig
from scheduler.request import Request


class KVCacheManager:
    """Gives blocks to requests, finds cached prefixes, and takes blocks back.

    The blocks of a request while it is given `num_new_tokens` more:

        | computed before | prefix hit  | loaded        | new tokens |
        |  in its table   | shared here | new blocks, to be filled   |
        0                               ^               ^            ^
                      local computed ───┘   total computed        slots needed
    """

    def __init__(self, config: CacheConfig, max_model_len: int) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._max_model_len = max_model_len
        self._block_size = config.block_size
        self._hashes_per_block = config.block_size // config.hash_block_size
        self._tables: dict[str, list[int]] = {}
        self._num_hashed: dict[str, int] = {}  # blocks of a table, from its front, with a hash

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def block_table(self, request_id: str) -> Sequence[int]:
        return self._tables.get(request_id, ())

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold the beginning of the request.

        At most `num_tokens` - 1 tokens, because the last one has to be computed to get logits.
        """
        if not self.config.enable_prefix_caching:
            return []
        found = []
        for index in range((request.num_tokens - 1) // self._block_size):
            block_id = self.pool.find(self._block_hash(request, index))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        prefix: Sequence[int] = (),
        num_external_tokens: int = 0,
        whole_must_fit: bool = False,
        delay_caching: bool = False,
    ) -> list[int] | None:
        """Blocks for the prefix hit, for tokens to be loaded, and for `num_new_tokens` more.

        Returns the blocks that are new (without the prefix hit), or None and changes nothing if
        the pool has too few. With `whole_must_fit` the whole request must fit, though only these
        tokens are given blocks. With `delay_caching` the blocks cannot be hit until
        `cache_blocks`, because what they will hold is still on its way.
        """
        table = self._tables.get(request.request_id, ())
        num_local = request.num_computed_tokens + len(prefix) * self._block_size
        num_computed = num_local + num_external_tokens
        num_slots = min(num_computed + num_new_tokens, self._max_model_len)
        num_held = len(table) + len(prefix)
        num_reused = sum(map(self.pool.is_unused, prefix))  # they leave the list of unused ones
        room = self.pool.num_unused - num_reused
        if whole_must_fit:
            whole = min(request.num_tokens, self._max_model_len)
            if self.blocks_for(max(whole, num_slots)) - num_held > room:
                return None
        num_fresh = max(0, self.blocks_for(num_slots) - num_held)
        if num_fresh > room:
            return None
        if prefix:
            self.pool.share(prefix)
        fresh = self.pool.take(num_fresh)
        if prefix or fresh:
            own = self._tables.setdefault(request.request_id, [])
            own.extend(prefix)
            own.extend(fresh)
        if prefix:
            self._num_hashed[request.request_id] = len(prefix)
        if not delay_caching:
            self.cache_blocks(request, min(num_computed + num_new_tokens, request.num_tokens))
        return fresh

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """The full blocks among the first `num_tokens` of the request can be hit from now on."""
        if not self.config.enable_prefix_caching:
            return
        num_full = num_tokens // self._block_size
        num_hashed = self._num_hashed.get(request.request_id, 0)
        if num_full <= num_hashed:
            return
        table = self._tables[request.request_id]
        hashes = [self._block_hash(request, index) for index in range(num_hashed, num_full)]
        parent = self._block_hash(request, num_hashed - 1) if num_hashed else None
        self.pool.remember(table[num_hashed:num_full], hashes, parent)
        self._num_hashed[request.request_id] = num_full

    def forget_uncomputed(self, request: Request, num_computed_tokens: int) -> None:
        """Take back the hashes of blocks whose tokens will not be computed after all."""
        num_valid = num_computed_tokens // self._block_size
        num_hashed = self._num_hashed.get(request.request_id, 0)
        for block_id in self._tables[request.request_id][num_valid:num_hashed]:
            self.pool.forget(block_id)
        self._num_hashed[request.request_id] = min(num_valid, num_hashed)

    def free(self, request_id: str) -> None:
        """Take the blocks back. The end of a prefix is to be evicted before its root."""
        self._num_hashed.pop(request_id, None)
        self.pool.release(reversed(self._tables.pop(request_id, [])))

    def tables(self) -> Iterable[Sequence[int]]:
        return self._tables.values()

    def _block_hash(self, request: Request, index: int) -> BlockHash:
        return request.block_hashes[(index + 1) * self._hashes_per_block - 1]
