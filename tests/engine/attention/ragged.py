"""Ragged batches over a paged cache, and what attention over them is, in float64, one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import KVCacheConfig
from engine.attention import AttentionMetadata
from engine.kv_cache import KVCache
from tests.engine.kernels.guarded import part_of_wider

NUM_LAYERS = 2
SHARPNESS = 2.0  # so that a few tokens have most of the weight


@dataclass(frozen=True)
class Shape:
    """What all sequences of a batch have in common."""

    num_kv_heads: int = 2
    group: int = 3  # query heads of a KV head
    head_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"  # of the cache

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass
class Tokens:
    """Queries, keys and values of all tokens of a sequence, and where they lie in the cache."""

    query: Tensor  # [length, num_heads, head_dim]
    key: Tensor  # [length, num_kv_heads, head_dim]
    value: Tensor
    block_ids: list[int]

    def __len__(self) -> int:
        return len(self.query)


@dataclass
class Ragged:
    """A cache full of NaN, and sequences of these lengths with blocks all over it."""

    shape: Shape
    lengths: Sequence[int]
    seed: int = 0
    layer: int = 1
    cache: KVCache = field(init=False)
    sequences: list[Tokens] = field(init=False)

    def __post_init__(self) -> None:
        counts = [-(-length // self.shape.block_size) for length in self.lengths]
        self.cache = nan_cache(self.shape, sum(counts) + 2)
        block_ids = list(range(1, sum(counts) + 2))
        random.Random(self.seed).shuffle(block_ids)
        generator = torch.Generator().manual_seed(self.seed)
        self.sequences = [
            self._sequence(length, [block_ids.pop() for _ in range(count)], generator)
            for length, count in zip(self.lengths, counts, strict=True)
        ]

    def _sequence(self, length: int, block_ids: list[int], generator: torch.Generator) -> Tokens:
        def heads(number: int) -> Tensor:
            return torch.randn(length, number, self.shape.head_dim, generator=generator)

        shape = self.shape
        query = SHARPNESS * heads(shape.num_heads)
        return Tokens(query, heads(shape.num_kv_heads), heads(shape.num_kv_heads), block_ids)

    def slots(self, index: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Block and offset of these tokens of a sequence."""
        positions = torch.arange(start, end)
        blocks = torch.tensor(self.sequences[index].block_ids)[positions // self.shape.block_size]
        return blocks, positions % self.shape.block_size

    def write(self, index: int, end: int) -> None:
        """As if the first tokens of a sequence had been computed."""
        sequence, (blocks, offsets) = self.sequences[index], self.slots(index, 0, end)
        pool = self.cache.layer(self.layer)
        pool[blocks, 0, offsets] = sequence.key[:end].to(pool.dtype)
        pool[blocks, 1, offsets] = sequence.value[:end].to(pool.dtype)

    def metadata(self, pieces: Sequence[tuple[int, int, int]]) -> AttentionMetadata:
        """Of a step with these (sequence, start, end)."""
        return AttentionMetadata.build(
            [end - start for _, start, end in pieces],
            [end for _, _, end in pieces],
            [self.sequences[index].block_ids for index, _, _ in pieces],
            self.shape.block_size,
        )

    def inputs(self, pieces: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """The packed queries, keys and values of a step, as parts of wider tensors."""
        of = [(self.sequences[index], slice(start, end)) for index, start, end in pieces]
        query = torch.cat([sequence.query[tokens] for sequence, tokens in of])
        key = torch.cat([sequence.key[tokens] for sequence, tokens in of])
        value = torch.cat([sequence.value[tokens] for sequence, tokens in of])
        return part_of_wider(query), part_of_wider(key), part_of_wider(value)

    def expected(self, index: int, start: int, end: int, window: int | None) -> Tensor:
        """`[end - start, num_heads, head_dim]` in float64, of the numbers that the cache holds."""
        sequence, dtype = self.sequences[index], getattr(torch, self.shape.dtype)
        keys, values = (x[:end].to(dtype).double() for x in (sequence.key, sequence.value))
        rows = []
        for position in range(start, end):
            first = 0 if window is None else max(0, position - window + 1)
            rows.append(
                _attend(
                    sequence.query[position].double().unflatten(0, (self.shape.num_kv_heads, -1)),
                    keys[first : position + 1],
                    values[first : position + 1],
                )
            )
        return torch.stack(rows)


def nan_cache(shape: Shape, num_blocks: int) -> KVCache:
    config = KVCacheConfig(
        num_blocks=num_blocks,
        block_size=shape.block_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    cache = KVCache(config)
    cache.tensor.fill_(math.nan)
    return cache


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One token's `[num_kv_heads, group, head_dim]` over `[num_tokens, num_kv_heads, head_dim]`."""
    scores = torch.einsum("hgd,thd->hgt", query, keys) / math.sqrt(query.shape[-1])
    return torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).flatten(0, 1)
