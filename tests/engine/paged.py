"""Computes logits over a paged cache by hand: steps without a scheduler and without a runner."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import KVCacheConfig
from engine.attention import Attention, AttentionMetadata, TorchAttention
from engine.kv_cache import KVCache
from engine.models import CausalLM
from tests.engine.tiny import VOCAB_SIZE

BLOCK_SIZE = 4
TOLERANCE = 1e-4

AttentionFactory = Callable[[KVCache, AttentionMetadata], Attention]


def random_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def nan_cache(model: CausalLM, num_blocks: int = 128) -> KVCache:
    """Reading a single slot that was not written shows in the result."""
    config = KVCacheConfig.for_model(model.config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    cache = KVCache(config)
    cache.tensor.fill_(torch.nan)
    return cache


@dataclass
class Sequential:
    """A sequence with its block table, computed piece by piece."""

    token_ids: list[int]
    block_ids: Sequence[int]
    num_computed: int = 0


def compute(
    model: CausalLM,
    cache: KVCache,
    pieces: Sequence[tuple[Sequential, int]],
    attention: AttentionFactory = TorchAttention,
) -> list[Tensor]:
    """One step; the logits of all tokens of each piece."""
    query_lens = [count for _, count in pieces]
    metadata = AttentionMetadata.build(
        query_lens,
        [sequence.num_computed + count for sequence, count in pieces],
        [sequence.block_ids for sequence, _ in pieces],
        BLOCK_SIZE,
    )
    input_ids = [
        token
        for sequence, count in pieces
        for token in sequence.token_ids[sequence.num_computed :][:count]
    ]
    made = attention(cache, metadata)
    hidden = model.forward(torch.tensor(input_ids), metadata.positions, made)
    for sequence, count in pieces:
        sequence.num_computed += count
    return list(model.compute_logits(hidden).split(query_lens))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
