"""Paged attention on a CPU by the compiled kernels: one call a layer, in place, no padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from engine.kernels import CompiledKernels
from engine.kv_cache import KVCache


class CompiledAttention:
    """One step's attention; see `engine.attention.Attention`.

    `on_layer` is called with a layer's number when its keys and values are written.
    """

    def __init__(
        self,
        kernels: CompiledKernels,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self._kernels = kernels
        self._kv_cache = kv_cache
        self._query_starts = torch.tensor(metadata.query_starts, dtype=torch.int32)
        self._context_lens = torch.tensor(metadata.context_lens, dtype=torch.int32)
        self._block_tables = metadata.block_tables.to(torch.int32)
        self._on_layer = on_layer

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, window: int | None = None
    ) -> Tensor:
        output = self._kernels.paged_attention(
            query,
            key,
            value,
            self._kv_cache.layer(layer),
            self._query_starts,
            self._context_lens,
            self._block_tables,
            window,
        )
        if self._on_layer is not None:
            self._on_layer(layer)
        return output
