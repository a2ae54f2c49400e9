"""Tokens of a request in blocks of two sizes, against copies made token by token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_transfer import BlockLayout, Extents
from kv_transfer.digest import digest_of
from kv_transfer.geometry import Placement, copies

ROW_BYTES = 4


def layout_of(block_size: int, num_layers: int) -> BlockLayout:
    return BlockLayout(
        fingerprint="f",
        dtype="float32",
        block_size=block_size,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=1,
        bytes_per_block=num_layers * 2 * block_size * ROW_BYTES,
    )


@dataclass(frozen=True)
class Case:
    """Tokens from `start` to `end` of a request that has its blocks in two pools."""

    ours: Placement
    theirs: Placement
    start: int
    end: int

    @property
    def moved(self) -> range:
        """With blocks of one size, all of the last block moves."""
        size = self.ours.layout.block_size
        same = size == self.theirs.layout.block_size
        return range(self.start, -(-self.end // size) * size if same else self.end)


@st.composite
def cases(draw: st.DrawFn, *, same_size: bool = False) -> Case:
    our_size = draw(st.integers(1, 9))
    their_size = our_size if same_size else draw(st.integers(1, 9))
    num_layers = draw(st.integers(1, 3))
    num_tokens = draw(st.integers(1, 40))
    first_block = draw(st.integers(0, (num_tokens - 1) // their_size))
    first = first_block * their_size
    step = our_size if our_size == their_size else 1
    start = draw(st.integers(first // step, (num_tokens - 1) // step).map(lambda n: n * step))
    end = draw(st.integers(start + 1, num_tokens))
    random = draw(st.randoms(use_true_random=False))

    def table(count: int) -> list[int]:
        return random.sample(range(1, count + 5), count)

    return Case(
        Placement(layout_of(our_size, num_layers), table(-(-num_tokens // our_size))),
        Placement(
            layout_of(their_size, num_layers),
            table(-(-num_tokens // their_size) - first_block),
            first_block,
        ),
        start,
        end,
    )


def pool_for(placement: Placement, seed: int) -> NDArray[np.uint8]:
    """[blocks, layers, keys/values, tokens, ROW_BYTES], filled at random."""
    layout = placement.layout
    shape = (max(placement.block_ids) + 1, layout.num_layers, 2, layout.block_size, ROW_BYTES)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def rows_of(pool: NDArray[np.uint8], placement: Placement, token: int) -> NDArray[np.uint8]:
    """[layers, keys/values, ROW_BYTES] of one token, in place."""
    number, offset = divmod(token, placement.layout.block_size)
    return pool[placement.block_ids[number - placement.first_block], :, :, offset]


def apply(extents: Extents, ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> None:
    source, target = ours.reshape(-1), theirs.reshape(-1)
    for at, to, size in extents.rows.tolist():
        target[to : to + size] = source[at : at + size]


@pytest.mark.parametrize("same_size", [True, False])
def test_the_rows_of_these_tokens_move_and_nothing_else(same_size: bool) -> None:
    @given(cases(same_size=same_size))
    def check(case: Case) -> None:
        ours, theirs = pool_for(case.ours, 1), pool_for(case.theirs, 2)
        expected = theirs.copy()
        for token in case.moved:
            rows_of(expected, case.theirs, token)[:] = rows_of(ours, case.ours, token)
        extents = copies(case.ours, case.theirs, case.start, case.end)
        assert extents.within(ours.size, theirs.size)
        assert not extents.cross_blocks(case.theirs.layout.bytes_per_block)
        apply(extents, ours, theirs)
        assert (theirs == expected).all()

    check()


@given(cases(same_size=True))
def test_with_one_size_a_block_moves_in_one_piece(case: Case) -> None:
    size = case.ours.layout.bytes_per_block
    extents = copies(case.ours, case.theirs, case.start, case.end)
    assert len(extents) == len(case.moved) // case.ours.layout.block_size
    assert set(extents.rows[:, 2].tolist()) == {size}


@given(cases(), st.data())
def test_runs_of_layers_together_are_all_layers(case: Case, data: st.DataObject) -> None:
    num_layers = case.ours.layout.num_layers
    cuts = data.draw(st.lists(st.integers(0, num_layers), max_size=3).map(sorted))
    borders = [0, *cuts, num_layers]
    ours = pool_for(case.ours, 1)
    whole, layerwise = pool_for(case.theirs, 2), pool_for(case.theirs, 2)
    apply(copies(case.ours, case.theirs, case.start, case.end), ours, whole)
    num_bytes = 0
    for first, stop in itertools.pairwise(borders):
        if first < stop:
            layers = range(first, stop)
            extents = copies(case.ours, case.theirs, case.start, case.end, layers)
            before = layerwise.copy()
            apply(extents, ours, layerwise)
            outside = [n for n in range(num_layers) if n not in layers]
            assert (layerwise[:, outside] == before[:, outside]).all()
            num_bytes += extents.num_bytes
    assert (layerwise == whole).all()
    assert num_bytes == len(case.moved) * num_layers * 2 * ROW_BYTES


@given(cases(), st.data())
def test_both_sides_have_the_same_digests(case: Case, data: st.DataObject) -> None:
    """Of each block of theirs, as far as there are tokens; and no byte of it may be another."""
    ours, theirs = pool_for(case.ours, 1), pool_for(case.theirs, 2)
    size = case.theirs.layout.block_size
    first = case.theirs.first_block * size
    for token in range(first, case.end):
        rows_of(theirs, case.theirs, token)[:] = rows_of(ours, case.ours, token)
    for start in range(first, case.end, size):
        end = min(start + size, case.end)
        digests = [
            digest_of(pool.reshape(-1).data, placement.runs(start, end))
            for pool, placement in ((ours, case.ours), (theirs, case.theirs))
        ]
        assert digests[0] == digests[1]
        rows_of(theirs, case.theirs, data.draw(st.integers(start, end - 1)))[0, 1, 0] ^= 1
        damaged = digest_of(theirs.reshape(-1).data, case.theirs.runs(start, end))
        assert damaged != digests[0]


@given(cases())
def test_a_placement_ends_behind_its_last_block(case: Case) -> None:
    for placement in (case.ours, case.theirs):
        rows_of(pool_for(placement, 0), placement, placement.end - 1)
        with pytest.raises(IndexError):
            rows_of(pool_for(placement, 0), placement, placement.end)
