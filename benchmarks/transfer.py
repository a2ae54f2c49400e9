"""How fast blocks move between two pools, against copying the same bytes with memcpy.

    python benchmarks/transfer.py [--json]

Rows: the memory transport with 64 MiB in one run of blocks, with 512 scattered ones of 32 KiB, and
with a single block; each with checksums (the default) and without.
"""

import ctypes
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks._result import Result, report
from kv_transfer import BlockLayout, BlockPoolMemory, MemoryHub, MemoryTransport, WriteState
from protocol import HandoffTicket

BLOCK_BYTES = 32 * 1024
CONTIGUOUS = 2048  # blocks: 64 MiB
SCATTERED = 512
REPEATS = 9
TICKET = HandoffTicket("benchmark", 0)


class Pair:
    """Two nodes' ends of a transport, with pools of their own."""

    def __init__(self, *, checksums: bool) -> None:
        hub = MemoryHub()
        self.arrived = threading.Event()
        self.source = MemoryTransport(hub, "source", checksums=checksums)
        self.target = MemoryTransport(hub, "target", checksums=checksums)
        self.pools = [make_pool(), make_pool()]
        self.source.register(self.pools[0], self.arrived.set)
        self.target.register(self.pools[1], lambda: None)
        self.target.open(TICKET, range(1, CONTIGUOUS + 1))

    def write(self, blocks: Sequence[tuple[int, int]]) -> None:
        self.arrived.clear()
        write = self.source.write(self.target.endpoint, TICKET, blocks)
        while write.state is WriteState.PENDING:
            self.arrived.wait(10)
            self.arrived.clear()
        assert write.state is WriteState.DONE

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The same bytes, as fast as this machine copies them: one memcpy for each run."""
        source, target = self.pools
        for ours, theirs, count in runs_of(blocks):
            ctypes.memmove(target.address_of(theirs), source.address_of(ours), count * BLOCK_BYTES)

    def close(self) -> None:
        self.source.close()
        self.target.close()


def runs_of(blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for ours, theirs in blocks:
        if runs and (ours, theirs) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((ours, theirs, 1))
    return runs


def make_pool() -> BlockPoolMemory:
    memory = np.ones((CONTIGUOUS + 1, BLOCK_BYTES), dtype=np.uint8)
    layout = BlockLayout(
        fingerprint="benchmark",
        dtype="float32",
        block_size=16,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        bytes_per_block=BLOCK_BYTES,
    )
    return BlockPoolMemory(layout, memory.ctypes.data, len(memory), memory)


def seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def alternate(first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
    """Medians of both, taken in turns, so that a slow moment of the machine hits both."""
    first()
    second()
    times = [(seconds(first), seconds(second)) for _ in range(REPEATS)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def measure(name: str, pair: Pair, blocks: Sequence[tuple[int, int]]) -> Result:
    ours, memcpy = alternate(lambda: pair.write(blocks), lambda: pair.copy(blocks))
    gigabytes = len(blocks) * BLOCK_BYTES / 1e9
    return Result(name, gigabytes / ours, "GB/s", gigabytes / memcpy, "memcpy")


def measure_latency(name: str, pair: Pair) -> Result:
    one = [(1, 1)]
    ours, memcpy = alternate(lambda: pair.write(one), lambda: pair.copy(one))
    return Result(name, ours * 1e6, "us", memcpy * 1e6, "memcpy")


def main() -> None:
    shuffled = list(range(1, CONTIGUOUS + 1))
    random.Random(0).shuffle(shuffled)
    contiguous = [(block, block) for block in range(1, CONTIGUOUS + 1)]
    scattered = list(zip(shuffled[:SCATTERED], shuffled[-SCATTERED:], strict=True))
    for suffix, checksums in (("", True), ("_no_checksums", False)):
        pair = Pair(checksums=checksums)
        report(
            [
                measure(f"memory_contiguous{suffix}", pair, contiguous),
                measure(f"memory_scattered{suffix}", pair, scattered),
                measure_latency(f"memory_one_block{suffix}", pair),
            ]
        )
        pair.close()


if __name__ == "__main__":
    main()
