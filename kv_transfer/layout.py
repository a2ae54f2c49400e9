"""What a block looks like in memory, and the pool of them that a transport may touch.

One block is one contiguous extent, block-major:

    pool    [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
             │           │           │  │           └──── one row ────────┘
             │           │           │  └ tokens, `row_bytes` apart
             │           │           └ keys, values
             │           └ layers, `bytes_per_layer` apart
             └ blocks, `bytes_per_block` apart
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from protocol import KvrelayError

if TYPE_CHECKING:
    from kv_transfer.block_copier import BlockCopier

# Blocks of two nodes may hold different numbers of tokens: rows are what moves then.
_MAY_DIFFER = frozenset({"block_size", "bytes_per_block"})


class LayoutMismatch(KvrelayError):
    """Two nodes cannot exchange KV; both values of the first field that differs are named."""

    label = "layout_mismatch"


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What blocks are. All but their size must be equal on both ends before a byte moves."""

    fingerprint: str  # of the model
    dtype: str
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int  # on this node
    head_dim: int
    bytes_per_block: int
    tp_size: int = 1  # nodes that share the heads of the model
    order: str = "block-major"  # as drawn above

    @property
    def row_bytes(self) -> int:
        """Of the keys, or the values, of one token in one layer."""
        return self.bytes_per_block // (self.num_layers * 2 * self.block_size)

    @property
    def bytes_per_layer(self) -> int:
        """Of the keys and values that one block holds of one layer."""
        return self.bytes_per_block // self.num_layers

    def check_compatible(self, other: BlockLayout, ours: str, theirs: str) -> None:
        """Raise LayoutMismatch if rows of `other` do not mean the same as ours."""
        for name in self.__struct_fields__:
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its and name not in _MAY_DIFFER:
                raise LayoutMismatch(f"{name} is {mine} on {ours}, but {its} on {theirs}")


class PeerPool(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells others of its pool."""

    layout: BlockLayout
    num_blocks: int  # with the null block

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block


@dataclass(frozen=True)
class BlockPoolMemory:
    """The memory of a pool, known by address. Only memory of the host can be viewed."""

    layout: BlockLayout
    address: int
    num_blocks: int  # with the null block
    owner: Any = None  # keeps the memory alive as long as somebody may copy
    fd: int | None = None  # of the memory, if other processes may map it
    device: str = "cpu"  # or cuda:N
    copier: BlockCopier | None = None  # of memory that is not the host's

    @property
    def shape(self) -> PeerPool:
        return PeerPool(layout=self.layout, num_blocks=self.num_blocks)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block

    def address_of(self, block_id: int) -> int:
        assert 0 < block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
        return self.address + block_id * self.layout.bytes_per_block

    def view(self, block_id: int) -> memoryview:
        """The bytes of one block, in place."""
        size = self.layout.bytes_per_block
        return memoryview((ctypes.c_char * size).from_address(self.address_of(block_id)))
