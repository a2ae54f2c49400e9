"""The memory that holds keys and values of all layers, in blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.kv_cache_config import KVCacheConfig


class KVCache:
    """One tensor for all blocks and layers; `KVCacheConfig` draws it.

    Nothing is touched at the start, so memory is taken as blocks come into use. What a block
    holds before it is written is arbitrary, NaN included: whoever reads must read written
    slots only, because a weight of zero does not make a NaN harmless.
    """

    def __init__(self, config: KVCacheConfig, memory: memoryview | None = None) -> None:
        """In `memory`, of `num_bytes` or more, or in memory of its own."""
        self.config = config
        dtype = getattr(torch, config.dtype)
        if memory is None:
            self.tensor = torch.empty(config.shape, dtype=dtype, device=config.device)
        else:
            count = math.prod(config.shape)
            self.tensor = torch.frombuffer(memory, dtype=dtype, count=count).view(config.shape)
        # [num_blocks * num_layers * 2 * block_size, num_kv_heads * head_dim]
        self._token_rows = self.tensor.view(-1, config.num_kv_heads * config.head_dim)

    # What a transport may know: an address range, cut into blocks.

    @property
    def base_address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.config.num_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.config.bytes_per_block

    @property
    def num_blocks(self) -> int:
        return self.config.num_blocks

    @property
    def dtype_name(self) -> str:
        return self.config.dtype

    @property
    def device_name(self) -> str:
        return self.config.device

    # What attention needs.

    def layer(self, index: int) -> Tensor:
        """Strided view `[num_blocks, 2, block_size, num_kv_heads, head_dim]` of one layer."""
        return self.tensor[:, index]

    def token_rows(self, layer: int) -> Tensor:
        """Rows `[num_rows, num_kv_heads * head_dim]`, one a token, keys or values.

        Row `key_rows(slots)` holds the keys of these slots in this layer, and the row
        `block_size` further on their values: the numbers are those of layer 0, and the view
        starts later, so that they are the same in every layer.
        """
        return self._token_rows[layer * 2 * self.config.block_size :]

    def key_rows(self, slots: Tensor) -> Tensor:
        """Rows of `token_rows` with the keys of `slots` (block id * block_size + offset)."""
        block_size = self.config.block_size
        rows_per_block = self.config.num_layers * 2 * block_size
        return slots // block_size * rows_per_block + slots % block_size
