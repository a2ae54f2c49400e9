"""Paged attention in plain PyTorch, on any device: gather the visible tokens, then fused attention.

Decodes (one query each) are gathered together, in groups of similar length; a prefill chunk is
gathered alone. Only written slots are ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.metadata import AttentionMetadata
from engine.kv_cache import KVCache

_GROUP_TOKENS = 4096  # gathered at once: with 3 heads of 64 floats about 6 MB, fits a shared cache
_GROUP_WASTE = 1.25  # a group's longest context may be this much longer than its shortest


class TorchAttention:
    """One step's attention; see `engine.attention.Attention`.

    `on_layer` is called with a layer's number when its keys and values are written.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self._kv_cache = kv_cache
        self._num_kv_heads = kv_cache.config.num_kv_heads
        self._written_keys = kv_cache.key_rows(metadata.slot_mapping)
        self._written_values = self._written_keys + metadata.block_size
        self._metadata = metadata
        self._parts: dict[int | None, list[_Part]] = {}  # by window
        self._on_layer = on_layer

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, window: int | None = None
    ) -> Tensor:
        rows = self._kv_cache.token_rows(layer)
        rows.index_copy_(0, self._written_keys, key.flatten(1).to(rows.dtype))
        rows.index_copy_(0, self._written_values, value.flatten(1).to(rows.dtype))
        if self._on_layer is not None:
            self._on_layer(layer)
        if window not in self._parts:
            self._parts[window] = list(_parts(self._kv_cache, self._metadata, window))
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for part in self._parts[window]:
            part.attend(rows, query, output)
        return output


class _Part(Protocol):
    def attend(self, rows: Tensor, query: Tensor, output: Tensor) -> None:
        """Fill in the part's own tokens of `output`."""


class _Gather:
    """Brings the visible tokens of some sequences together."""

    def __init__(
        self, kv_cache: KVCache, metadata: AttentionMetadata, sequences: Sequence[int]
    ) -> None:
        slots = metadata.context_slots(sequences)
        keys = kv_cache.key_rows(slots)
        self._rows = torch.stack((keys, keys + metadata.block_size)).flatten()
        config = kv_cache.config
        self._shape = (2, *slots.shape, config.num_kv_heads, config.head_dim)

    def __call__(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values, each `[num_sequences, num_kv_heads, longest context, head_dim]`."""
        gathered = rows.index_select(0, self._rows).to(dtype).view(self._shape).transpose(2, 3)
        return gathered[0], gathered[1]


class _DecodeGroup:
    """Sequences with one query each and contexts of similar length.

    The query heads that share a KV head become the rows of one small matrix, so that each
    gathered key is used for all of them at once.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        sequences: Sequence[int],
        window: int | None,
    ) -> None:
        self._gather = _Gather(kv_cache, metadata, sequences)
        self._queries = torch.tensor([metadata.query_starts[index] for index in sequences])
        lengths = torch.tensor([metadata.context_lens[index] for index in sequences])
        visible = _visible(lengths[:, None] - 1, int(lengths.max()), window)
        self._mask = None if visible.all() else visible[:, None, None, :]

    def attend(self, rows: Tensor, query: Tensor, output: Tensor) -> None:
        keys, values = self._gather(rows, query.dtype)
        num_seqs, num_kv_heads, _, head_dim = keys.shape
        grouped = query[self._queries].view(num_seqs, num_kv_heads, -1, head_dim)
        mask = None if self._mask is None else self._mask.expand(-1, -1, grouped.shape[2], -1)
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        output[self._queries] = attended.reshape(num_seqs, -1, head_dim)


class _PrefillChunk:
    """One sequence with several queries, each of which sees one token more than the last."""

    def __init__(
        self,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        sequence: int,
        window: int | None,
    ) -> None:
        self._gather = _Gather(kv_cache, metadata, [sequence])
        start, end = metadata.query_starts[sequence], metadata.query_starts[sequence + 1]
        self._queries = slice(start, end)
        context_len = metadata.context_lens[sequence]
        self._mask: Tensor | None = None  # not needed without context: each sees the ones before
        if context_len > end - start or window is not None:
            self._mask = _visible(metadata.positions[start:end, None], context_len, window)

    def attend(self, rows: Tensor, query: Tensor, output: Tensor) -> None:
        keys, values = self._gather(rows, query.dtype)
        attended = scaled_dot_product_attention(
            query[self._queries].transpose(0, 1)[None],
            keys,
            values,
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=True,
        )
        output[self._queries] = attended[0].transpose(0, 1)


def _visible(positions: Tensor, context_len: int, window: int | None) -> Tensor:
    """Whether each of `context_len` tokens is seen from `positions` `[num_queries, 1]`."""
    context = torch.arange(context_len, device=positions.device)
    visible = context <= positions
    return visible if window is None else visible & (context > positions - window)


def _parts(kv_cache: KVCache, metadata: AttentionMetadata, window: int | None) -> Iterator[_Part]:
    for group in _decode_groups(metadata):
        yield _DecodeGroup(kv_cache, metadata, group, window)
    for index, query_len in enumerate(metadata.query_lens):
        if query_len > 1:
            yield _PrefillChunk(kv_cache, metadata, index, window)


def _decode_groups(metadata: AttentionMetadata) -> Iterator[list[int]]:
    """Cut the sequences with one query, ordered by length, where a group would get too large."""
    lengths = metadata.context_lens
    decodes = [index for index, length in enumerate(metadata.query_lens) if length == 1]
    group: list[int] = []
    for index in sorted(decodes, key=lengths.__getitem__):
        is_full = (len(group) + 1) * lengths[index] > _GROUP_TOKENS
        if group and (is_full or lengths[index] > lengths[group[0]] * _GROUP_WASTE + 16):
            yield group
            group = []
        group.append(index)
    if group:
        yield group
