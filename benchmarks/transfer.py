"""How fast KV moves between two pools, against copying the same bytes with memcpy.

    python benchmarks/transfer.py [--json] [memory] [shm] [nixl]
    python benchmarks/transfer.py [--json] nixl --bind ADDRESS --target ENDPOINT

The two ends are processes of their own, but for `memory`. For each transport: 64 MiB in one piece,
512 scattered blocks of 32 KiB, and 64 MiB or so of scattered blocks as three models have them; one
block, there and noticed; messages. What a checksum costs, which is made beside the transfer, is
measured by itself.

With --target the far end is on another host: start it there, as benchmarks/_transfer_node.py says,
with blocks of 32768 bytes, 2049 of them. Each end wants to know the endpoint that the other prints.
"""

import argparse
import ctypes
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from benchmarks._result import Result, report
from benchmarks._transfer_node import TICKET, Node, Target, make_node
from kv_transfer import Extents, MemoryHub, WriteState
from kv_transfer.digest import bytes_of

REPEATS = 61
MESSAGES = 2000
TOTAL = 64 << 20
KIB_32 = 32 * 1024
NUM_BLOCKS = TOTAL // KIB_32 + 1
# Bytes of a block of 16 tokens: layers * (keys, values) * tokens * KV heads * head size * bytes
MODELS = {
    "135m": 30 * 2 * 16 * 3 * 64 * 4,  # SmolLM2-135M in float32
    "8b": 32 * 2 * 16 * 8 * 128 * 2,  # Llama 3 8B in bfloat16
    "70b": 80 * 2 * 16 * 8 * 128 * 2,  # Llama 3 70B in bfloat16
}


class Pair:
    """A node here, and one that it writes to."""

    def __init__(self, source: Node, peer: str, reference: memoryview) -> None:
        self.source = source
        self.peer = source.transport.resolve(peer)
        self._memory = reference  # as long as its address is used
        self._reference = ctypes.addressof(ctypes.c_char.from_buffer(reference))
        self._block_bytes = source.pool.layout.bytes_per_block
        source.transport.connect(self.peer)
        while source.transport.peer_pool(self.peer) is None:
            source.wait()

    def extents(self, pairs: Sequence[tuple[int, int]]) -> Extents:
        return Extents.of_blocks(pairs, self._block_bytes)

    def write(self, extents: Extents) -> None:
        write = self.source.transport.write(self.peer, TICKET, extents)
        while write.state is WriteState.PENDING:
            self.source.wait()
        assert write.state is WriteState.DONE

    def copy(self, extents: Extents) -> None:
        """The same bytes as fast as this machine copies them: one memcpy for each run."""
        source, target = self.source.pool.address, self._reference
        for ours, theirs, size in extents.merged().rows.tolist():
            ctypes.memmove(target + theirs, source + ours, size)

    def ask(self) -> None:
        """A message there, and its answer."""
        self.source.transport.notify(self.peer, b"?")
        while not self.source.transport.receive():
            self.source.wait()

    def tell(self) -> None:
        """Many messages, and one answer at the end."""
        for _ in range(MESSAGES):
            self.source.transport.notify(self.peer, b"!" * 100)
        self.ask()


@contextmanager
def pair_of(scheme: str, block_bytes: int, num_blocks: int) -> Iterator[Pair]:
    hub = MemoryHub()
    source = make_node(scheme, "source", block_bytes, num_blocks, hub)
    reference = memoryview(bytearray(b"\x02" * (block_bytes * num_blocks)))
    if scheme == "memory":
        target = target_here(source, make_node(scheme, "target", block_bytes, num_blocks, hub))
    else:
        target = target_process(source, [scheme, str(block_bytes), str(num_blocks)])
    with target as endpoint:
        yield Pair(source, endpoint, reference)
    source.transport.close()


@contextmanager
def target_here(source: Node, node: Node) -> Iterator[str]:
    target = Target(node, source.transport.endpoint)
    serving = threading.Thread(target=target.serve)
    serving.start()
    yield node.transport.endpoint
    target.stop()
    serving.join()


@contextmanager
def target_process(source: Node, arguments: list[str]) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._transfer_node", *arguments],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    endpoint = process.stdout.readline().strip()
    process.stdin.write(source.transport.endpoint + "\n")
    process.stdin.flush()
    yield endpoint
    process.stdin.close()
    assert process.wait(30) == 0


def seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def alternate(first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
    """Medians of both, taken in turns, so that a slow moment of the machine hits both."""
    for _ in range(3):
        first()
        second()
    times = [(seconds(first), seconds(second)) for _ in range(REPEATS)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def measure(name: str, pair: Pair, blocks: Sequence[tuple[int, int]]) -> Result:
    extents = pair.extents(blocks)
    ours, memcpy = alternate(lambda: pair.write(extents), lambda: pair.copy(extents))
    gigabytes = extents.num_bytes / 1e9
    return Result(name, gigabytes / ours, "GB/s", gigabytes / memcpy, "memcpy")


def measure_latency(scheme: str, pair: Pair) -> list[Result]:
    """Of one block, written and known to be, and of messages."""
    one = pair.extents([(1, 1)])
    ours, memcpy = alternate(lambda: pair.write(one), lambda: pair.copy(one))
    tell = statistics.median(seconds(pair.tell) for _ in range(5))
    ask = statistics.median(seconds(pair.ask) for _ in range(200))
    return [
        Result(f"{scheme}_one_block", ours * 1e6, "us", memcpy * 1e6, "memcpy"),
        Result(f"{scheme}_messages", MESSAGES / tell, "1/s", 1 / ask, "one after the other"),
    ]


def measure_checksums(pair: Pair) -> Result:
    """They are made beside the transfer, by another core if there is one."""
    memory, one_block = bytes_of(pair.source.pool), KIB_32
    blocks = range(one_block, TOTAL, one_block)
    extents = pair.extents([(block, block) for block in range(1, TOTAL // one_block)])

    def make_all() -> None:
        for at in blocks:
            xxhash.xxh3_64_intdigest(memory[at : at + one_block])

    ours, memcpy = alternate(make_all, lambda: pair.copy(extents))
    return Result("checksums", TOTAL / ours / 1e9, "GB/s", TOTAL / memcpy / 1e9, "memcpy")


def scattered(num_blocks: int, count: int) -> list[tuple[int, int]]:
    shuffled = list(range(1, num_blocks))
    random.Random(0).shuffle(shuffled)
    return list(zip(shuffled[:count], shuffled[-count:], strict=True))


def measure_pair(scheme: str, pair: Pair) -> list[Result]:
    whole = [(block, block) for block in range(1, NUM_BLOCKS)]
    return [
        measure(f"{scheme}_contiguous", pair, whole),
        measure(f"{scheme}_scattered", pair, scattered(NUM_BLOCKS, 512)),
        *measure_latency(scheme, pair),
        *([measure_checksums(pair)] if scheme == "memory" else []),
    ]


def measure_far(scheme: str, bind: str, target: str) -> None:
    source = make_node(scheme, "source", KIB_32, NUM_BLOCKS, MemoryHub(), bind)
    print(f"tell the target: {source.transport.endpoint}", file=sys.stderr, flush=True)
    input()
    report(measure_pair(scheme, Pair(source, target, memoryview(bytearray(source.pool.num_bytes)))))
    source.transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/transfer.py")
    parser.add_argument("schemes", nargs="*", default=["memory", "shm", "nixl"])
    parser.add_argument("--json", action="store_true")  # read by `report`
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--target")
    given = parser.parse_args()
    for scheme in given.schemes:
        if given.target is not None:
            measure_far(scheme, given.bind, given.target)
            continue
        with pair_of(scheme, KIB_32, NUM_BLOCKS) as pair:
            report(measure_pair(scheme, pair))
        for model, block_bytes in MODELS.items():
            count = TOTAL // block_bytes
            with pair_of(scheme, block_bytes, 2 * count + 1) as pair:
                report([measure(f"{scheme}_{model}", pair, scattered(2 * count + 1, count))])


if __name__ == "__main__":
    main()
