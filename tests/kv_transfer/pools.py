"""KV pools of a few small blocks that a test can see, set, and hold back."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_transfer import BlockLayout, BlockPoolMemory, Extents
from kv_transfer.transports.copy_thread import copy_extents

TIMEOUT_S = 10.0  # until a test gives up waiting for what should happen at once

LAYOUT = BlockLayout(
    fingerprint="f",
    dtype="float32",
    block_size=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
    bytes_per_block=512,
)


class Gate:
    """Stops the first that comes by, until it is opened."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def wait_until_reached(self) -> None:
        assert self._reached.wait(TIMEOUT_S), "nobody came to the gate"

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        self._reached.set()
        assert self._opened.wait(TIMEOUT_S), "the gate was never opened"


@dataclass(frozen=True)
class GatedPool(BlockPoolMemory):
    """Whoever copies block `n` has to pass `gates[n]` first."""

    gates: dict[int, Gate] = field(default_factory=dict)

    def copy_extents(self, extents: Extents, our_address: int, their_address: int) -> None:
        """One after the other, through the gates of our blocks: `copy` of a transport."""
        for row in extents.rows:
            gate = self.gates.get(int(row[0]) // self.layout.bytes_per_block)
            if gate is not None:
                gate.pass_through()
            copy_extents(Extents(row.reshape(1, 3)), our_address, their_address)

    def gate(self, block_id: int) -> Gate:
        """A closed gate in front of this block."""
        return self.gates.setdefault(block_id, Gate())

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """[num_blocks, bytes_per_block], the memory itself."""
        memory = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        return np.ctypeslib.as_array(memory).reshape(self.num_blocks, -1)


def make_pool(num_blocks: int = 33, layout: BlockLayout = LAYOUT, fill: int = 0) -> GatedPool:
    memory = np.full((num_blocks, layout.bytes_per_block), fill, dtype=np.uint8)
    return GatedPool(layout, memory.ctypes.data, num_blocks, memory)


def make_random_pool(seed: int, num_blocks: int = 33, layout: BlockLayout = LAYOUT) -> GatedPool:
    pool = make_pool(num_blocks, layout)
    pool.bytes[:] = np.random.default_rng(seed).integers(0, 256, pool.bytes.shape, np.uint8)
    return pool
