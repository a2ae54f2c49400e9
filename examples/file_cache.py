"""A KV connector of your own: keeps the KV of finished requests in files, and loads it again.

A request whose beginning was computed before, be it before a restart, loads it instead of computing
it. One file holds one block, its name is the block's hash, which covers all tokens up to its end:

    directory / node and layout / block hash        checksum (16 bytes) | the bytes of the block

It is configured in `cluster.yaml`, with this directory on the path of Python:

    transfer:
      connectors:
        - class: "file_cache:FileCacheConnector"
          options: {directory: /var/cache/kvrelay, max_bytes: 10_000_000_000}

What happens to a request here:

    get_num_new_matched_tokens    so many of its next blocks have files
    update_state_after_alloc      it was admitted: these are the blocks to load them into
    build_connector_meta          what is to be done with this step goes to the worker's side
    start_load_kv                 files are read into blocks; those that are not as they were
                                  written are reported, and the scheduler has them computed
    request_finished              its full blocks that have no files yet are kept for us ...
    get_finished                  ... and written, while the next step is computed

Reading and writing keep the engine's thread busy: a connector for slow disks would do it in
threads, and promise its loads as asynchronous.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import msgspec
import xxhash

from kv_transfer import BaseConnector, BlockPoolMemory, ConnectorContext
from protocol import (
    BlockHash,
    ConfigError,
    FinishReason,
    KVConnectorOutput,
    RequestView,
    StepView,
)

_CHECKSUM_BYTES = 16
_UNFINISHED = ".part"
_OPTIONS = {"directory": str, "max_bytes": int}

logger = logging.getLogger(__name__)


class BlockFiles:
    """Blocks by their hash. Those that were not used for longest go when there is no room."""

    def __init__(self, directory: Path, block_bytes: int, max_bytes: int) -> None:
        self._directory = directory
        self._max_files = max_bytes // (block_bytes + _CHECKSUM_BYTES)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unfinished in directory.glob(f"*{_UNFINISHED}"):
            unfinished.unlink()
        known = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        self._names = dict.fromkeys(path.name for path in known)  # the least recently used first
        self._make_room(0)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash.hex() in self._names

    def read(self, block_hash: BlockHash, into: memoryview) -> bool:
        """Whether the block is there, as it was written. If not, it is there no more."""
        name = block_hash.hex()
        try:
            data = (self._directory / name).read_bytes()
        except OSError as error:
            logger.warning("the file of a block cannot be read: %s", error)
            data = b""
        checksum, block = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
        if len(block) != len(into) or xxhash.xxh3_128_digest(block) != checksum:
            self._drop(name)
            return False
        into[:] = block
        self._note_use(name)
        return True

    def write(self, block_hash: BlockHash, block: memoryview) -> None:
        """A reader, or a restart, sees the whole file or none."""
        name = block_hash.hex()
        if name in self._names or self._max_files == 0:
            return
        self._make_room(1)
        path = self._directory / name
        unfinished = path.with_suffix(_UNFINISHED)
        try:
            unfinished.write_bytes(xxhash.xxh3_128_digest(block) + block)
            _note_time(unfinished)
            unfinished.replace(path)
        except OSError as error:
            logger.warning("a block is not kept: %s", error)
            return
        self._names[name] = None

    def _note_use(self, name: str) -> None:
        self._names.pop(name, None)
        self._names[name] = None
        with contextlib.suppress(OSError):
            _note_time(self._directory / name)

    def _make_room(self, num_files: int) -> None:
        while self._names and len(self._names) + num_files > self._max_files:
            self._drop(next(iter(self._names)))

    def _drop(self, name: str) -> None:
        self._names.pop(name, None)
        with contextlib.suppress(OSError):
            (self._directory / name).unlink()


def _note_time(path: Path) -> None:
    """The order of use has to outlive a restart; a file system's own clock may be too coarse."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


BlocksByHash = list[tuple[BlockHash, int]]  # with the ids of the blocks in the pool


@dataclass(frozen=True)
class Orders:
    """What is to be done with one step."""

    loads: BlocksByHash
    saves: Mapping[str, BlocksByHash]  # of requests that have ended, by id


class FileCacheConnector(BaseConnector):
    """Loads within the step that admits a request; saves when it has ended."""

    def __init__(self, context: ConnectorContext) -> None:
        self._directory, self._max_bytes = _parsed(context.options)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("directory", f"cannot be made: {error}") from error
        self._node_id = context.node_id
        self._block_size = context.block_size
        self._first_match: dict[str, int] = {}  # number of the first block that could be loaded
        self._loads: BlocksByHash = []
        self._saves: dict[str, BlocksByHash] = {}
        # The worker's side.
        self._to_save: dict[str, BlocksByHash] = {}
        self._invalid: set[int] = set()

    def register_kv_caches(
        self, pool: BlockPoolMemory, on_activity: Callable[[], None] = lambda: None, /
    ) -> None:
        # Blocks of another model or layout mean something else, though their hashes are the same.
        layout = xxhash.xxh3_64_hexdigest(msgspec.json.encode(pool.layout))
        directory = self._directory / f"{self._node_id}-{layout}"
        self._files = BlockFiles(directory, pool.layout.bytes_per_block, self._max_bytes)
        self._pool = pool
        self._on_activity = on_activity

    # ------------------------------------------------------------------ the scheduler's side

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int, bool]:
        first = num_computed_tokens // self._block_size
        # The last token is computed in any case, for what follows it.
        end = (request.num_tokens - 1) // self._block_size
        candidates = self._block_hashes(request)[first:end]
        num_found = sum(1 for _ in takewhile(self._files.__contains__, candidates))
        self._first_match[request.request_id] = first
        return num_found * self._block_size, False

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if num_external_tokens == 0:
            return
        first = self._first_match[request.request_id]
        loaded = slice(first, first + num_external_tokens // self._block_size)
        hashes = self._block_hashes(request)[loaded]
        self._loads += zip(hashes, block_ids[loaded], strict=True)

    def build_connector_meta(self, step: StepView) -> Orders:
        orders = Orders(self._loads, self._saves)
        self._loads, self._saves = [], {}
        return orders

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        self._first_match.pop(request.request_id, None)
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False  # a step that still runs may be computing it from a load that failed
        # The last token was sampled, not computed.
        num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
        hashes = self._block_hashes(request)[: num_computed // self._block_size]
        # If it was preempted while its last token was sampled, it has no blocks any more.
        blocks = [
            pair for pair in zip(hashes, block_ids, strict=False) if pair[0] not in self._files
        ]
        if blocks:
            self._saves[request.request_id] = blocks
        return bool(blocks)

    def _block_hashes(self, request: RequestView) -> Sequence[BlockHash]:
        """Of its full blocks. A block is named by the last of the pieces that are hashed."""
        step = self._block_size // request.hash_block_size
        return request.block_hashes[step - 1 :: step]

    # ------------------------------------------------------------------ the worker's side

    def start_load_kv(self, meta: object) -> None:
        assert isinstance(meta, Orders)
        for block_hash, block_id in meta.loads:
            if not self._files.read(block_hash, self._bytes(block_id)):
                self._invalid.add(block_id)
        self._to_save |= meta.saves
        if meta.saves:
            self._on_activity()  # an engine that has nothing to compute is to ask us nevertheless

    def get_finished(self) -> KVConnectorOutput:
        to_save, self._to_save = self._to_save, {}
        for blocks in to_save.values():
            for block_hash, block_id in blocks:
                self._files.write(block_hash, self._bytes(block_id))
        invalid, self._invalid = frozenset(self._invalid), set()
        return KVConnectorOutput(finished_sending=tuple(to_save), invalid_block_ids=invalid)

    def _bytes(self, block_id: int) -> memoryview:
        return self._pool.view(block_id).cast("B")


def _parsed(options: Mapping[str, object]) -> tuple[Path, int]:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(name, f"unknown option; known: {', '.join(_OPTIONS)}")
        if not isinstance(value, _OPTIONS[name]):
            raise ConfigError(name, f"must be of type {_OPTIONS[name].__name__}")
    if "directory" not in options:
        raise ConfigError("directory", "is missing")
    return Path(str(options["directory"])), int(str(options.get("max_bytes", 1 << 30)))
