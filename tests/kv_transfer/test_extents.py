from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import Extents

POOL = 64  # bytes


def extents_of(rows: list[tuple[int, int, int]]) -> Extents:
    return Extents(np.array(rows, dtype=np.int64).reshape(-1, 3))


def copied(extents: Extents) -> list[tuple[int, int]]:
    """(from, to) of each byte, in their order."""
    return [(a + n, b + n) for a, b, size in extents.rows.tolist() for n in range(size)]


rows = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)), max_size=8
) | st.integers(1, 9).map(lambda count: [(8 * n, 16 + 8 * n, 8) for n in range(count)])


def test_whole_blocks() -> None:
    extents = Extents.of_blocks([(1, 5), (2, 3)], 8)
    assert extents.rows.tolist() == [[8, 40, 8], [16, 24, 8]]
    assert (len(extents), extents.num_bytes) == (2, 16)
    assert extents.their_blocks(8) == {5, 3}
    assert len(Extents.of_blocks([], 8)) == Extents.of_blocks([], 8).num_bytes == 0


@given(rows)
def test_merged_runs_copy_the_same_bytes_in_the_same_order(
    rows: list[tuple[int, int, int]],
) -> None:
    merged = extents_of(rows).merged()
    assert copied(merged) == copied(extents_of(rows))
    following = zip(merged.rows, merged.rows[1:], strict=False)
    assert not any((one[:2] + one[2] == other[:2]).all() for one, other in following)


def test_what_follows_on_one_side_only_is_not_merged() -> None:
    apart = [(0, 0, 8), (8, 16, 8), (24, 24, 8), (32, 32, 8)]
    assert extents_of(apart).merged().rows.tolist() == [[0, 0, 8], [8, 16, 8], [24, 24, 16]]


@given(st.integers(0, 40), st.integers(1, 20), st.integers(1, 9))
def test_an_extent_crosses_a_block_if_its_last_byte_is_in_another(
    at: int, n: int, size: int
) -> None:
    crosses = at // size != (at + n - 1) // size
    assert extents_of([(0, at, n)]).cross_blocks(size) == crosses


@given(st.integers(-3, POOL), st.integers(-3, POOL), st.integers(1, 9))
def test_all_bytes_lie_in_the_pools_or_it_is_noticed(ours: int, theirs: int, n: int) -> None:
    inside = min(ours, theirs) >= 0 and max(ours, theirs) + n <= POOL
    assert extents_of([(0, 0, 1), (ours, theirs, n)]).within(POOL, POOL) == inside


def test_the_pools_may_have_different_sizes() -> None:
    extents = extents_of([(8, 40, 8)])
    assert extents.within(16, 48)
    assert not extents.within(15, 48)
    assert not extents.within(16, 47)
