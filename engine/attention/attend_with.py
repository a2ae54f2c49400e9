"""Which attention goes with which kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.attention.attention import Attention
from engine.attention.compiled_attention import CompiledAttention
from engine.attention.metadata import AttentionMetadata
from engine.attention.torch_attention import TorchAttention
from engine.kernels import CompiledKernels, Kernels
from engine.kv_cache import KVCache

MakeAttention = Callable[[AttentionMetadata, Callable[[int], None] | None], Attention]


def attend_with(kernels: Kernels, kv_cache: KVCache) -> MakeAttention:
    """What makes the attention of a step, from its metadata and an `on_layer`."""
    if isinstance(kernels, CompiledKernels):
        return partial(CompiledAttention, kernels, kv_cache)
    return partial(TorchAttention, kv_cache)
