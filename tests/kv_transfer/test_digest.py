"""Checksums beside the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import xxhash

from kv_transfer import ThreadDigester
from kv_transfer.digest import Digest, bytes_of, digest_of
from kv_transfer.geometry import Runs
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, GatedPool, make_random_pool

SIZE = LAYOUT.bytes_per_block


class Digesting:
    def __init__(self) -> None:
        self.pool: GatedPool = make_random_pool(seed=3)
        self.told = threading.Semaphore(0)
        self.digester = ThreadDigester(self.pool, self.told.release)

    def finish(self, *digests: Digest) -> None:
        for _ in digests:
            assert self.told.acquire(timeout=TIMEOUT_S)
        assert all(digest.values is not None for digest in digests)


@pytest.fixture
def digesting() -> Iterator[Digesting]:
    digesting = Digesting()
    yield digesting
    digesting.digester.close()


def test_a_digest_is_that_of_the_bytes_of_all_runs_in_their_order() -> None:
    pool = make_random_pool(seed=3)
    memory = bytes_of(pool)
    everything = pool.bytes.tobytes()
    assert memory.tobytes() == everything
    runs: Runs = [(700, 100), (3, 5), (700, 1)]
    joined = b"".join(everything[at : at + size] for at, size in runs)
    assert digest_of(memory, runs) == xxhash.xxh3_64_intdigest(joined)
    assert digest_of(memory, runs[:1]) == xxhash.xxh3_64_intdigest(everything[700:800])


def test_digests_are_made_one_after_the_other(digesting: Digesting) -> None:
    blocks: list[Runs] = [[(n * SIZE, SIZE)] for n in range(1, 9)]
    digests = [digesting.digester.start(blocks[:n]) for n in range(9)]
    digesting.finish(*digests)
    memory = bytes_of(digesting.pool)
    expected = tuple(digest_of(memory, runs) for runs in blocks)
    assert [digest.values for digest in digests] == [expected[:n] for n in range(9)]


def test_a_node_that_digests_nothing_has_no_thread() -> None:
    before = threading.active_count()
    digesting = Digesting()
    assert threading.active_count() == before
    digesting.finish(digesting.digester.start([]))
    assert threading.active_count() == before + 1
    digesting.digester.close()
    assert threading.active_count() == before


def test_after_close_nothing_is_read_any_more(digesting: Digesting) -> None:
    digesting.finish(digesting.digester.start([[(0, SIZE)]]))
    digesting.digester.close()
    late = digesting.digester.start([[(0, SIZE)]])
    digesting.digester.close()
    assert late.values is None
