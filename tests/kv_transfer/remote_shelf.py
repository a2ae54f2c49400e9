"""A connector that loads and saves beside the steps, from and to a shelf in memory.

It takes its time, loses some of what it was to load, and writes rubbish into the blocks of a load
until that has ended: whoever reads them too early gets the wrong tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kv_transfer import BaseConnector, BlockPoolMemory
from protocol import BlockHash, FinishReason, KVConnectorOutput, RequestView, StepView

Shelf = dict[BlockHash, bytes]
BlocksByHash = tuple[tuple[BlockHash, int], ...]


@dataclass
class Transfer:
    """Under way for so many rounds more."""

    request_id: str
    blocks: BlocksByHash
    rounds: int


class ShelfConnector(BaseConnector):
    """Blocks have one hash each: the size of a block is that of a piece that is hashed."""

    def __init__(
        self, shelf: Shelf, *, rounds: int = 3, loss: float = 0.0, revocable: bool = False
    ) -> None:
        self.shelf = shelf
        self.num_loads = 0
        self.num_revoked = 0
        self._rng = random.Random(0)
        self._rounds, self._loss, self._revocable = rounds, loss, revocable
        self._first: dict[str, int] = {}
        self._ordered: list[Transfer] = []
        self._loads: list[Transfer] = []
        self._sends: list[Transfer] = []

    def register_kv_caches(
        self, pool: BlockPoolMemory, on_activity: Callable[[], None] = lambda: None, /
    ) -> None:
        self._pool = pool

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int, bool]:
        size = self._pool.layout.block_size
        first = self._first[request.request_id] = num_computed_tokens // size
        candidates = request.block_hashes[first : (request.num_tokens - 1) // size]
        return size * sum(1 for _ in takewhile(self.shelf.__contains__, candidates)), True

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            first = self._first[request.request_id]
            loaded = slice(first, first + num_external_tokens // self._pool.layout.block_size)
            blocks = tuple(zip(request.block_hashes[loaded], block_ids[loaded], strict=True))
            self._ordered.append(Transfer(request.request_id, blocks, self._rounds))
            self.num_loads += 1

    def build_connector_meta(self, step: StepView) -> list[Transfer]:
        ordered, self._ordered = self._ordered, []
        return ordered

    def start_load_kv(self, meta: object) -> None:
        assert isinstance(meta, list)
        self._loads += meta
        for load in meta:
            for _, block_id in load.blocks:
                self._write(block_id, b"\xee" * self._pool.layout.bytes_per_block)

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False
        num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
        hashes = request.block_hashes[: num_computed // self._pool.layout.block_size]
        blocks = tuple(zip(hashes, block_ids, strict=False))
        if blocks:
            self._sends.append(Transfer(request.request_id, blocks, self._rounds))
        return bool(blocks)

    def revoke_pin(self) -> str | None:
        if not (self._revocable and self._sends):
            return None
        self.num_revoked += 1
        return self._sends.pop().request_id

    def get_finished(self) -> KVConnectorOutput:
        recving: dict[str, tuple[int, ...]] = {}
        invalid: set[int] = set()
        for load in _ended(self._loads):
            recving[load.request_id] = ()
            for block_hash, block_id in load.blocks:
                if self._rng.random() < self._loss:
                    invalid.add(block_id)
                else:
                    self._write(block_id, self.shelf[block_hash])
        sent = _ended(self._sends)
        for send in sent:
            self.shelf |= {name: bytes(self._pool.view(block)) for name, block in send.blocks}
        return KVConnectorOutput(
            recving, tuple(send.request_id for send in sent), frozenset(invalid)
        )

    def _write(self, block_id: int, data: bytes) -> None:
        self._pool.view(block_id).cast("B")[:] = data


def _ended(transfers: list[Transfer]) -> list[Transfer]:
    """Those that end in this round; they are taken out."""
    for transfer in transfers:
        transfer.rounds -= 1
    ended = [transfer for transfer in transfers if transfer.rounds <= 0]
    transfers[:] = [transfer for transfer in transfers if transfer.rounds > 0]
    return ended
