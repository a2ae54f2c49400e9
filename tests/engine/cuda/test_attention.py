"""Both kinds of attention against plain torch, over kernels that do what is documented."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from engine.attention import AttentionMetadata, TorchAttention
from engine.cuda.attention_backend import AttentionBackend
from engine.cuda.flashinfer_attention import FlashInferBackend
from engine.cuda.kv_writer import KVWriter
from engine.cuda.packed_step import PackedStep
from engine.cuda.seats import Seats
from engine.cuda.staging import StagingRing
from engine.cuda.varlen_attention import VarlenBackend
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.runner_request import RunnerRequests
from protocol import SamplingParams
from scheduler import NewRequestData, SchedulerOutput
from tests.engine.cuda import reference_kernels
from tests.engine.cuda.deferred_stream import DeferredStream
from tests.engine.cuda.runners import KINDS

BLOCK_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 6, 2, 8
MAX_LEN = 64

# (tokens that are computed now, tokens before them)
RAGGED = ((5, 0), (1, 17), (4, 9), (1, 0), (9, 30))
DECODES = ((1, 17), (1, 3), (1, 40))
WINDOWS = (None, 1, 3, 8, 100)


class Case:
    """A cache with some tokens in it, and a step that adds to them."""

    def __init__(self, lengths: tuple[tuple[int, int], ...]) -> None:
        torch.manual_seed(3)
        config = KVCacheConfig(90, BLOCK_SIZE, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
        self.filled = torch.randn(config.shape)
        self.caches = KVCache(config), KVCache(config)
        for cache in self.caches:
            cache.tensor.copy_(self.filled)
        self.query_lens = [now for now, _ in lengths]
        self.context_lens = [now + before for now, before in lengths]
        ids = random.Random(4).sample(range(1, 90), 80)
        self.tables = [
            [ids.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in self.context_lens
        ]
        total = sum(self.query_lens)
        heads = torch.randn(total, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        # Parts of one tensor, as models have them.
        self.qkv = heads.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)

    def packed(self) -> PackedStep:
        requests, seats = RunnerRequests(), Seats(8, MAX_LEN // BLOCK_SIZE)
        step = SchedulerOutput()
        spans = zip(self.query_lens, self.context_lens, self.tables, strict=True)
        for n, (now, length, table) in enumerate(spans):
            step.scheduled_new_reqs.append(
                NewRequestData(f"r{n}", [1] * length, 1, SamplingParams(), table, length - now)
            )
            step.num_scheduled_tokens[f"r{n}"] = now
        requests.update(step)
        seats.update(step, requests)
        return PackedStep.of(step.num_scheduled_tokens, requests, seats, BLOCK_SIZE)

    def expected(self, layer: int, window: int | None) -> torch.Tensor:
        metadata = AttentionMetadata.build(
            self.query_lens, self.context_lens, self.tables, BLOCK_SIZE
        )
        return TorchAttention(self.caches[0], metadata)(layer, *self.qkv, window=window)


def make_backend(kind: str, stream: DeferredStream, cache: KVCache) -> AttentionBackend:
    if kind == "varlen":
        return VarlenBackend(cache, MAX_LEN, kernel=reference_kernels.varlen_attn)
    return FlashInferBackend(reference_kernels.Library, stream, cache, NUM_HEADS, WINDOWS, MAX_LEN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [RAGGED, DECODES])
def test_a_ragged_batch(
    stream: DeferredStream, kind: str, window: int | None, lengths: tuple[tuple[int, int], ...]
) -> None:
    case = Case(lengths)
    cache = case.caches[1]
    backend, packed = make_backend(kind, stream, cache), case.packed()
    ring = StagingRing(stream, 1 << 16)
    results: list[torch.Tensor] = []
    with ring.stage({**packed.inputs(cache), **backend.arrays(packed)}) as staged:

        def work() -> None:
            attention = backend.ragged(packed, staged, KVWriter(cache, staged.device))
            results.extend(attention(layer, *case.qkv, window=window) for layer in (1, 0))

        stream.submit(work)
    stream.record().synchronize()
    for layer, result in zip((1, 0), results, strict=True):
        expected = case.expected(layer, window)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(case.caches[0].tensor, case.caches[1].tensor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_padded_decode_again_and_again(
    stream: DeferredStream, kind: str, window: int | None
) -> None:
    """Planned for one batch and then for another, over the same tensors."""
    size = 4
    ring = StagingRing(stream, 1 << 16)
    first = Case(((1, 30), (1, 2), (1, 0)))
    backend = make_backend(kind, stream, first.caches[1])
    padded = first.packed().padded(size)
    arrays = {**padded.inputs(first.caches[1]), **backend.arrays(padded)}
    with ring.stage(arrays) as staged:
        attention = backend.decode(size, staged, KVWriter(first.caches[1], staged.device))

    def attend(qkv: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        results.append(attention(0, *qkv, window=window))

    for case in (first, Case(DECODES), Case(((1, 5),))):
        cache = first.caches[1]  # the one that the attention knows
        cache.tensor.copy_(case.filled)
        padded = case.packed().padded(size)
        qkv = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, size - len(t))) for t in case.qkv]
        results: list[torch.Tensor] = []
        with ring.stage({**padded.inputs(cache), **backend.arrays(padded)}) as staged:
            attention.plan(padded, staged)
            stream.submit(partial(attend, qkv, results))
        stream.record().synchronize()
        (result,) = results
        expected = case.expected(0, window)
        torch.testing.assert_close(result[: len(expected)], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(cache.tensor[1:], case.caches[0].tensor[1:])
        assert result.isfinite().all()


@pytest.mark.parametrize("invariant", [False, True])
def test_keys_are_not_split_where_batches_must_not_matter(
    stream: DeferredStream, invariant: bool
) -> None:
    case = Case(DECODES)
    cache, packed = case.caches[1], case.packed()
    asked: list[object] = []

    def kernel(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(options["num_splits"])
        return arguments[0]

    backend = VarlenBackend(cache, MAX_LEN, batch_invariant=invariant, kernel=kernel)
    with StagingRing(stream, 1 << 16).stage(
        {**packed.inputs(cache), **backend.arrays(packed)}
    ) as staged:
        backend.ragged(packed, staged, KVWriter(cache, staged.device))(0, *case.qkv)
    assert asked == [1 if invariant else None]
