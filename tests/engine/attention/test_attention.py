"""All attention against softmax in float64, over caches full of NaN where nothing was written."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import CompiledAttention, TorchAttention
from tests.engine.attention.conftest import MakeAttention
from tests.engine.attention.ragged import Ragged, Shape
from tests.engine.kernels.guarded import threads

TOLERANCE = 1e-5

Pieces = list[tuple[int, int, int]]  # sequence, first token and end of those that a step computes

SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([8, 16, 20, 64, 80, 128]),
    block_size=st.sampled_from([4, 16, 32]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
WINDOWS = st.sampled_from([None, 1, 5, 64, 100])
QUERIES = st.one_of(st.just(1), st.integers(1, 40), st.integers(60, 130))
CONTEXTS = st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 200))


def check(
    attention: MakeAttention, ragged: Ragged, pieces: Pieces, window: int | None = None
) -> None:
    """One step after all that is before its tokens."""
    for index, start, _ in pieces:
        ragged.write(index, start)
    before = ragged.cache.tensor.clone()
    attend = attention(ragged.cache, ragged.metadata(pieces))
    result = attend(ragged.layer, *ragged.inputs(pieces), window=window)
    assert result.is_contiguous()
    assert result.dtype == torch.float32
    parts = result.split([end - start for _, start, end in pieces])
    for part, piece in zip(parts, pieces, strict=True):
        expected = ragged.expected(*piece, window)
        torch.testing.assert_close(part.double(), expected, atol=TOLERANCE, rtol=0)
    check_cache(ragged, pieces, before)


def check_cache(ragged: Ragged, pieces: Pieces, before: Tensor) -> None:
    """The step's own tokens are there, and nothing else has changed."""
    for index, _, end in pieces:
        ragged.write(index, end)
    now = ragged.cache.tensor.clone()
    ragged.cache.tensor.copy_(before)
    for index, _, end in pieces:
        ragged.write(index, end)
    assert torch.equal(now.nan_to_num(1e9), ragged.cache.tensor.nan_to_num(1e9))


@settings(max_examples=150, deadline=None)
@given(
    shape=SHAPES,
    spans=st.lists(st.tuples(CONTEXTS, QUERIES), min_size=1, max_size=6),
    window=WINDOWS,
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 1 << 16),
)
def test_ragged_batches(
    attention: MakeAttention,
    shape: Shape,
    spans: list[tuple[int, int]],
    window: int | None,
    num_threads: int,
    seed: int,
) -> None:
    ragged = Ragged(shape, [context + queries for context, queries in spans], seed)
    pieces = [(index, start, start + count) for index, (start, count) in enumerate(spans)]
    with threads(num_threads):
        check(attention, ragged, pieces, window)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 64, 600])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_seqs", [1, 2, 20], ids="{} sequences".format)
def test_long_contexts(
    attention: MakeAttention, num_seqs: int, dtype: str, window: int | None, num_threads: int
) -> None:
    """Around the ends of what is summed up by itself, by one thread or by several."""
    around = [511, 512, 513, 1023, 1024, 1025, 1536, 1700, 575, 576, 577, 1]
    lengths = [around[index % len(around)] for index in range(3, 3 + num_seqs)]
    ragged = Ragged(Shape(num_kv_heads=1, dtype=dtype), lengths, seed=num_seqs)
    with threads(num_threads):
        check(attention, ragged, [(i, n - 1, n) for i, n in enumerate(lengths)], window)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("window", [None, 30, 513])
@pytest.mark.parametrize(("start", "end"), [(500, 530), (1020, 1090), (0, 700), (447, 1025)])
def test_chunks_over_several_segments(
    attention: MakeAttention, start: int, end: int, window: int | None, num_threads: int
) -> None:
    ragged = Ragged(Shape(num_kv_heads=1, group=2, head_dim=20), [end, 40])
    with threads(num_threads):
        check(attention, ragged, [(0, start, end), (1, 39, 40)], window)


def test_prefix_blocks_that_the_same_step_computes(attention: MakeAttention) -> None:
    """The second sequence begins with the first one's blocks."""
    ragged = Ragged(Shape(), [48, 40])
    first, second = ragged.sequences
    second.block_ids[:2] = first.block_ids[:2]
    second.key[:32], second.value[:32] = first.key[:32], first.value[:32]
    attend = attention(ragged.cache, ragged.metadata([(1, 32, 40), (0, 0, 48)]))
    result = attend(ragged.layer, *ragged.inputs([(1, 32, 40), (0, 0, 48)]))
    expected = torch.cat((ragged.expected(1, 32, 40, None), ragged.expected(0, 0, 48, None)))
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_scores_so_large_that_one_token_has_all_the_weight(
    attention: MakeAttention, size: float
) -> None:
    ragged = Ragged(Shape(group=1), [100, 700])
    for sequence in ragged.sequences:
        sequence.query *= size
    check(attention, ragged, [(0, 0, 100), (1, 699, 700)])


def test_all_scores_alike_give_the_mean(attention: MakeAttention) -> None:
    ragged = Ragged(Shape(), [600])
    ragged.sequences[0].query.zero_()
    check(attention, ragged, [(0, 590, 600)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_rounded_as_torch_does(attention: MakeAttention, dtype: str) -> None:
    """To the nearest, ties to even, over the whole range of numbers; infinity and NaN stay."""
    shape = Shape(num_kv_heads=1, group=1, head_dim=64, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(1 << 31), 1 << 31, (64, 1, 64), generator=generator)
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4e38, 1e-45, 1.00390625, 1.01])
    values = numbers.to(torch.int32).view(torch.float32).clone()
    values[0, 0, : len(odd)] = odd
    ragged = Ragged(shape, [64])
    attend = attention(ragged.cache, ragged.metadata([(0, 0, 64)]))
    attend(0, torch.zeros(64, 1, 64), values, values)
    blocks, offsets = ragged.slots(0, 0, 64)
    pool = ragged.cache.layer(0)
    for written in (pool[blocks, 0, offsets], pool[blocks, 1, offsets]):
        torch.testing.assert_close(written, values.to(pool.dtype), rtol=0, atol=0, equal_nan=True)


def test_layers_are_told_when_they_are_written(attention: MakeAttention) -> None:
    ragged = Ragged(Shape(), [20])
    told: list[int] = []
    pieces = [(0, 0, 20)]
    attend = attention(ragged.cache, ragged.metadata(pieces), told.append)
    for layer in range(2):
        attend(layer, *ragged.inputs(pieces))
        assert told == list(range(layer + 1))
        blocks, offsets = ragged.slots(0, 0, 20)
        assert ragged.cache.layer(layer)[blocks, :, offsets].isfinite().all()


def test_each_layer_may_have_its_own_window(attention: MakeAttention) -> None:
    ragged = Ragged(Shape(), [90])
    pieces = [(0, 0, 90)]
    attend = attention(ragged.cache, ragged.metadata(pieces))
    for layer, window in ((0, 7), (1, None), (0, 40), (1, 7)):
        result = attend(layer, *ragged.inputs(pieces), window=window)
        expected = ragged.expected(0, 0, 90, window)
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCE, rtol=0)


def test_kernels_have_their_own_attention(
    attention: MakeAttention, compiled: MakeAttention
) -> None:
    def kind(make: MakeAttention) -> type:
        ragged = Ragged(Shape(), [3])
        return type(make(ragged.cache, ragged.metadata([(0, 0, 3)])))

    assert kind(compiled) is CompiledAttention
    assert kind(attention) in (TorchAttention, CompiledAttention)


def test_a_cache_of_other_numbers_is_refused(compiled: MakeAttention) -> None:
    ragged = Ragged(Shape(dtype="float16"), [3])
    attend = compiled(ragged.cache, ragged.metadata([(0, 0, 3)]))
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        attend(0, *ragged.inputs([(0, 0, 3)]))
