"""Which bytes of one pool go where in another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Extents:
    """Runs of bytes to be copied from our pool into a peer's.

    `rows` is `[num_extents, 3]` of int64: offset in our pool, offset in the peer's, bytes. Offsets
    count from the start of a pool, its null block included.
    """

    rows: NDArray[np.int64]

    @classmethod
    def of_blocks(cls, pairs: Iterable[tuple[int, int]], bytes_per_block: int) -> Extents:
        """Whole blocks, as (our block, the peer's block) pairs, where both are of this size."""
        blocks = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        rows = np.empty((len(blocks), 3), dtype=np.int64)
        rows[:, :2] = blocks * bytes_per_block
        rows[:, 2] = bytes_per_block
        return cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return int(self.rows[:, 2].sum())

    def merged(self) -> Extents:
        """The same bytes in as few runs as follow each other in both pools."""
        rows = self.rows
        if len(rows) < 2:
            return self
        ends = rows[:-1, :2] + rows[:-1, 2:]
        starts_run = np.concatenate(([True], (ends != rows[1:, :2]).any(axis=1)))
        first = np.flatnonzero(starts_run)
        merged = rows[first].copy()
        merged[:, 2] = np.add.reduceat(rows[:, 2], first)
        return Extents(merged)

    def their_blocks(self, bytes_per_block: int) -> frozenset[int]:
        """The blocks of the peer that are touched; extents do not cross blocks."""
        return frozenset((self.rows[:, 1] // bytes_per_block).tolist())

    def cross_blocks(self, bytes_per_block: int) -> bool:
        """Whether any leaves the block of the peer in which it begins."""
        rows = self.rows
        return bool((rows[:, 1] % bytes_per_block + rows[:, 2] > bytes_per_block).any())

    def within(self, our_bytes: int, their_bytes: int) -> bool:
        """Whether all lies in pools of these sizes."""
        rows = self.rows
        ends = rows[:, :2] + rows[:, 2:]
        return bool((rows >= 0).all() and (ends <= (our_bytes, their_bytes)).all())
