"""Whole models of each family: the bits of a token's logits do not depend on what is around it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import Attention, AttentionMetadata, CompiledAttention
from engine.engine_config import Quantization
from engine.kernels import CompiledKernels
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.models import CausalLM, load_model
from tests.engine.kernels.guarded import assert_same_bits, threads
from tests.engine.models.families import FAMILIES
from tests.engine.paged import BLOCK_SIZE, Sequential, compute, random_tokens
from tests.engine.tiny import tiny_model_dir

LONG = 130  # rows: more than what a library would multiply


@dataclass(frozen=True)
class Computing:
    """A model, and what it computes with."""

    model: CausalLM
    kernels: CompiledKernels
    dtype: str  # of the KV cache

    def cache(self) -> KVCache:
        config = KVCacheConfig.for_model(
            self.model.config, num_blocks=256, block_size=BLOCK_SIZE, dtype=self.dtype
        )
        cache = KVCache(config)
        cache.tensor.fill_(torch.nan)
        return cache

    def step(
        self, cache: KVCache, pieces: list[tuple[Sequential, int]], num_threads: int = 1
    ) -> list[Tensor]:
        def attention(cache: KVCache, metadata: AttentionMetadata) -> Attention:
            return CompiledAttention(self.kernels, cache, metadata)

        with threads(num_threads):
            return compute(self.model, cache, pieces, attention)

    def alone(self, token_ids: list[int]) -> Tensor:
        """The logits of all its tokens, computed one by one."""
        cache, sequence = self.cache(), Sequential(token_ids, range(1, 60))
        return torch.cat([self.step(cache, [(sequence, 1)])[0] for _ in token_ids])


VARIANTS = {
    "float32": (None, "float32"),
    "int8": (Quantization.INT8, "float32"),
    "bfloat16 KV": (None, "bfloat16"),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family")
    return tiny_model_dir(directory, seed=4, gain=1.0, **FAMILIES[request.param])


@pytest.fixture(scope="module", params=list(VARIANTS))
def computing(
    request: pytest.FixtureRequest, family: Path, invariant: CompiledKernels
) -> Computing:
    quantization, dtype = VARIANTS[request.param]
    model = load_model(family, invariant, quantization=quantization)
    return Computing(model, invariant, dtype)


@pytest.fixture(scope="module")
def expected(computing: Computing) -> Tensor:
    return computing.alone(random_tokens(1, LONG))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_at_once(computing: Computing, expected: Tensor, num_threads: int) -> None:
    sequence = Sequential(random_tokens(1, LONG), random.Random(1).sample(range(1, 256), 40))
    (logits,) = computing.step(computing.cache(), [(sequence, LONG)], num_threads)
    assert logits.isfinite().all()
    assert_same_bits(logits, expected)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_in_any_chunks_and_batches(
    computing: Computing, expected: Tensor, data: st.DataObject
) -> None:
    """Several requests with the same tokens and others, which start and go on as they like."""
    tokens = random_tokens(1, LONG)
    lengths = [LONG, *data.draw(st.lists(st.integers(1, LONG), max_size=4))]
    block_ids = random.Random(data.draw(st.integers(0, 100))).sample(range(1, 256), 255)
    sequences = [
        Sequential(tokens[:length], block_ids[index * 40 :][:40])
        for index, length in enumerate(lengths)
    ]
    cache = computing.cache()
    while missing := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        chosen = data.draw(st.lists(st.sampled_from(missing), unique_by=id, min_size=1))
        pieces = [(s, data.draw(st.integers(1, len(s.token_ids) - s.num_computed))) for s in chosen]
        starts = [s.num_computed for s in chosen]
        logits = computing.step(cache, pieces, data.draw(st.integers(1, 3)))
        for rows, (_, count), start in zip(logits, pieces, starts, strict=True):
            assert_same_bits(rows, expected[start : start + count])


def test_without_asking_for_it_small_steps_are_the_same(
    family: Path, usual: CompiledKernels, invariant: CompiledKernels
) -> None:
    """Only steps of many tokens compute in another way."""
    tokens = random_tokens(2, 95)
    logits = []
    for kernels in (usual, invariant):
        computing = Computing(load_model(family, kernels), kernels, "float32")
        sequence, cache = Sequential(tokens, range(1, 60)), computing.cache()
        logits.append([computing.step(cache, [(sequence, count)])[0] for count in (60, 1, 34)])
    assert_same_bits(torch.cat(logits[0]), torch.cat(logits[1]))
