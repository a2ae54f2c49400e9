"""A query gets the same bits alone, in any chunk, in any batch and with any number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.attention.conftest import MakeAttention
from tests.engine.attention.ragged import Ragged, Shape
from tests.engine.attention.test_attention import SHAPES
from tests.engine.kernels.guarded import assert_same_bits, threads

WINDOWS = st.sampled_from([None, 1, 5, 64, 100, 600])
THREADS = st.integers(1, 4)

Piece = tuple[int, int, int]


def attend(
    attention: MakeAttention,
    ragged: Ragged,
    pieces: list[Piece],
    window: int | None,
    num_threads: int,
) -> list[Tensor]:
    """One step; what each piece gets."""
    with threads(num_threads):
        made = attention(ragged.cache, ragged.metadata(pieces))
        result = made(ragged.layer, *ragged.inputs(pieces), window=window)
    return list(result.split([end - start for _, start, end in pieces]))


def alone(
    attention: MakeAttention, shape: Shape, lengths: list[int], seed: int, window: int | None
) -> list[Tensor]:
    """What all tokens of each sequence get, one token a step, by one thread."""
    ragged = Ragged(shape, lengths, seed)
    return [
        torch.cat(
            [
                attend(attention, ragged, [(index, token, token + 1)], window, 1)[0]
                for token in range(length)
            ]
        )
        for index, length in enumerate(lengths)
    ]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=SHAPES,
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    window=WINDOWS,
    seed=st.integers(0, 1 << 16),
)
def test_any_chunks_in_any_batches(
    compiled: MakeAttention,
    data: st.DataObject,
    shape: Shape,
    lengths: list[int],
    window: int | None,
    seed: int,
) -> None:
    expected = alone(compiled, shape, lengths, seed, window)
    ragged, done = Ragged(shape, lengths, seed), [0] * len(lengths)
    while missing := [index for index, length in enumerate(lengths) if done[index] < length]:
        chosen = data.draw(st.lists(st.sampled_from(missing), min_size=1, unique=True))
        counts = {
            index: data.draw(st.integers(1, lengths[index] - done[index])) for index in chosen
        }
        pieces = [(index, done[index], done[index] + count) for index, count in counts.items()]
        results = attend(compiled, ragged, pieces, window, data.draw(THREADS))
        for result, (index, start, end) in zip(results, pieces, strict=True):
            assert_same_bits(result, expected[index][start:end])
            done[index] = end


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 64, 600])
def test_long_contexts(compiled: MakeAttention, window: int | None, dtype: str) -> None:
    """One sequence, shared among threads by its segments, and many, shared as they are."""
    shape, ends = Shape(num_kv_heads=1, dtype=dtype), [511, 512, 513, 1024, 1025, 1300]
    ragged = Ragged(shape, [1300] * 16, seed=1)
    for index in range(16):
        ragged.write(index, 1300)
    together = {
        end: attend(compiled, ragged, [(i, end - 1, end) for i in range(16)], window, 2)
        for end in ends
    }
    chunk = attend(compiled, ragged, [(0, 400, 1300)], window, 3)[0]
    for end in ends:
        for num_threads in (1, 2, 4):
            (result,) = attend(compiled, ragged, [(0, end - 1, end)], window, num_threads)
            assert_same_bits(result, together[end][0])
            assert_same_bits(result, chunk[end - 401 : end - 400])


def test_other_blocks(compiled: MakeAttention) -> None:
    """Where a sequence lies, and in blocks of which size, is no matter."""
    results = []
    for block_size, others in ((4, 0), (16, 1), (32, 3)):
        ragged = Ragged(Shape(block_size=block_size), [200, *[90] * others], seed=5)
        results += attend(compiled, ragged, [(0, 0, 200)], None, 2)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])
