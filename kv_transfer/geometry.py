"""Where the tokens of a request are in a pool, and how they get to where they are in another.

    tokens of a request   0 ....... 15 | 16 ...... 31 | 32 .... 39
    blocks at P (16)      block 4      | block 9      | block 2
    blocks at D (32)      block 7                     | block 3

With blocks of one size whole blocks move, each in one piece. With different sizes runs of rows do:
for each piece between two borders of either side, one run a layer for keys and one for values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_transfer.extents import Extents
from kv_transfer.layout import BlockLayout

Runs = Sequence[tuple[int, int]]  # (offset in the pool, bytes)


@dataclass(frozen=True)
class Placement:
    """Blocks of a request in one pool; the first of them is block number `first_block` of it."""

    layout: BlockLayout
    block_ids: Sequence[int]
    first_block: int = 0

    @property
    def end(self) -> int:
        """The token behind the last that there is room for."""
        return (self.first_block + len(self.block_ids)) * self.layout.block_size

    def offsets_of(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offsets in the pool of these tokens' keys in layer 0."""
        size = self.layout.block_size
        ids = np.asarray(self.block_ids, dtype=np.int64)[tokens // size - self.first_block]
        return ids * self.layout.bytes_per_block + tokens % size * self.layout.row_bytes

    def runs(self, start: int, end: int) -> Runs:
        """The bytes of the tokens from `start` to `end`, in the order layer, keys/values, token."""
        layout = self.layout
        if start % layout.block_size == 0 and end - start == layout.block_size:
            block_id = self.block_ids[start // layout.block_size - self.first_block]
            return [(block_id * layout.bytes_per_block, layout.bytes_per_block)]
        starts, sizes = _pieces(start, end, layout.block_size)
        offsets = _steps(layout, range(layout.num_layers))[:, None] + self.offsets_of(starts)
        lengths = np.broadcast_to(sizes * layout.row_bytes, offsets.shape)
        return list(zip(offsets.ravel().tolist(), lengths.ravel().tolist(), strict=True))


def copies(
    ours: Placement, theirs: Placement, start: int, end: int, layers: range | None = None
) -> Extents:
    """What to copy for the tokens from `start` to `end`, of all layers or of a run of them.

    With blocks of one size, `start` is the first token of a block, and all of the last block goes.
    """
    layers = range(ours.layout.num_layers) if layers is None else layers
    if ours.layout.block_size == theirs.layout.block_size:
        return _block_copies(ours, theirs, start, end, layers)
    starts, sizes = _pieces(start, end, ours.layout.block_size, theirs.layout.block_size)
    shape = (len(starts), 2 * len(layers))
    rows = np.empty((*shape, 3), dtype=np.int64)
    for column, side in enumerate((ours, theirs)):
        rows[:, :, column] = side.offsets_of(starts)[:, None] + _steps(side.layout, layers)
    rows[:, :, 2] = (sizes * ours.layout.row_bytes)[:, None]
    return Extents(rows.reshape(-1, 3))


def _block_copies(
    ours: Placement, theirs: Placement, start: int, end: int, layers: range
) -> Extents:
    layout = ours.layout
    assert start % layout.block_size == 0, start
    firsts = np.arange(start, end, layout.block_size, dtype=np.int64)
    rows = np.empty((len(firsts), 3), dtype=np.int64)
    rows[:, 0] = ours.offsets_of(firsts)
    rows[:, 1] = theirs.offsets_of(firsts)
    rows[:, :2] += layers.start * layout.bytes_per_layer
    rows[:, 2] = len(layers) * layout.bytes_per_layer
    return Extents(rows)


def _pieces(start: int, end: int, *sizes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First tokens and lengths of what lies between the borders of blocks of these sizes."""
    borders = [np.arange((start // size + 1) * size, end, size, dtype=np.int64) for size in sizes]
    cuts = np.unique(np.concatenate(([start], *borders, [end])).astype(np.int64))
    return cuts[:-1], np.diff(cuts)


def _steps(layout: BlockLayout, layers: range) -> NDArray[np.int64]:
    """From the keys in layer 0 of a token to its keys and its values in these layers."""
    halves = np.arange(2 * layers.start, 2 * layers.stop, dtype=np.int64)
    return halves * (layout.bytes_per_layer // 2)
