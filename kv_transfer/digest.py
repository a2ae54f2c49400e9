"""Checksums of blocks, computed beside the engine's thread.

The digest of a block is the xxh3-64 of the bytes of its tokens, in the order layer, keys/values,
token. So it is the same for a block that holds the same tokens anywhere, whatever the block sizes
there, and what lies behind the last token of a request does not count.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from kv_transfer.geometry import Runs
from kv_transfer.layout import BlockPoolMemory

_JOIN_TIMEOUT_S = 10.0


class Digest:
    """Checksums that are being computed; `values` has one for each block, None until then."""

    def __init__(self, blocks: Sequence[Runs]) -> None:
        self.blocks = blocks
        self.values: tuple[int, ...] | None = None


class Digester(Protocol):
    """Reads blocks of a pool and makes digests of them."""

    def start(self, blocks: Sequence[Runs]) -> Digest:
        """One checksum for each of the blocks, of these runs of its bytes."""

    def close(self) -> None:
        """Returns when the pool is read no more."""


def digest_of(memory: memoryview, runs: Runs) -> int:
    """The checksum of these (offset, bytes) runs."""
    if len(runs) == 1:
        offset, size = runs[0]
        return xxhash.xxh3_64_intdigest(memory[offset : offset + size])
    state = xxhash.xxh3_64()
    for offset, size in runs:
        state.update(memory[offset : offset + size])
    return state.intdigest()


def bytes_of(pool: BlockPoolMemory) -> memoryview:
    """All of a pool, in place."""
    return memoryview((ctypes.c_char * pool.num_bytes).from_address(pool.address))


def pool_digest(pool: BlockPoolMemory, runs: Runs) -> int:
    """The checksum of these runs, which come to the host first if they are on another device."""
    if pool.copier is None:
        return digest_of(bytes_of(pool), runs)
    memory = pool.copier.read(pool.address, runs)
    return digest_of(memory, [(0, len(memory))])


class ThreadDigester:
    """One thread for each node, outside the interpreter lock while it reads a block.

    A hand-off has at most one digest under way, so what waits here is as bounded as those are.
    """

    def __init__(self, pool: BlockPoolMemory, on_done: Callable[[], None]) -> None:
        self._pool = pool
        self._on_done = on_done
        self._waiting: queue.SimpleQueue[Digest | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-digest", daemon=True)

    def start(self, blocks: Sequence[Runs]) -> Digest:
        digest = Digest(blocks)
        if self._thread.ident is None:  # a node that moves nothing needs no thread
            self._thread.start()
        self._waiting.put(digest)
        return digest

    def close(self) -> None:
        self._closed = True
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        if self._pool.copier is not None:
            self._pool.copier.enter_thread()
        while (digest := self._waiting.get()) is not None and not self._closed:
            digest.values = tuple(pool_digest(self._pool, runs) for runs in digest.blocks)
            self._on_done()
