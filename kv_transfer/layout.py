"""What a block looks like in memory, and the pool of them that a transport may touch.

One block is one contiguous extent, block-major:

    pool    [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
             │           └────────────────── one block ─────────────────┘
             └ bytes_per_block apart
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol import KvrelayError


class LayoutMismatch(KvrelayError):
    """Two nodes cannot exchange blocks; both values of the first field that differs are named."""

    label = "layout_mismatch"


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All that must be equal on both ends before the first byte moves."""

    fingerprint: str  # of the model
    dtype: str
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_block: int

    def check_same(self, other: BlockLayout, ours: str, theirs: str) -> None:
        """Raise LayoutMismatch if blocks of `other` do not mean the same as ours."""
        for name in self.__struct_fields__:
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                raise LayoutMismatch(f"{name} is {mine} on {ours}, but {its} on {theirs}")


@dataclass(frozen=True)
class BlockPoolMemory:
    """The memory of a pool, known by address. Device memory is not addressed by this class."""

    layout: BlockLayout
    address: int
    num_blocks: int  # with the null block
    owner: Any = None  # keeps the memory alive as long as somebody may copy

    def address_of(self, block_id: int) -> int:
        assert 0 < block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
        return self.address + block_id * self.layout.bytes_per_block

    def view(self, block_id: int) -> memoryview:
        """The bytes of one block, in place."""
        size = self.layout.bytes_per_block
        return memoryview((ctypes.c_char * size).from_address(self.address_of(block_id)))
