"""Our Llama over paged blocks gives the logits of transformers, however a step is composed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models import CausalLM, load_model
from tests.engine.conftest import Reference, reference_for
from tests.engine.paged import Sequential, assert_close, compute, nan_cache, random_tokens
from tests.engine.tiny import tiny_model_dir


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 40])
def test_prefill_at_once(tiny_model: CausalLM, reference: Reference, length: int) -> None:
    tokens = random_tokens(length, length)
    sequence = Sequential(tokens, range(1, 20))
    (logits,) = compute(tiny_model, nan_cache(tiny_model), [(sequence, length)])
    assert_close(logits, reference(tokens))


@pytest.mark.parametrize(
    "chunks", [(1,) * 23, (4, 4, 4, 11), (3, 5, 1, 14), (7, 1, 1, 13, 1), (16, 7), (22, 1)]
)
def test_chunks_with_scrambled_blocks(
    tiny_model: CausalLM, reference: Reference, chunks: tuple[int, ...]
) -> None:
    tokens = random_tokens(7, 23)
    block_ids = random.Random(3).sample(range(1, 128), 6)
    sequence, cache = Sequential(tokens, block_ids), nan_cache(tiny_model)
    logits = [compute(tiny_model, cache, [(sequence, count)])[0] for count in chunks]
    assert_close(torch.cat(logits), reference(tokens))


def test_ragged_batch_of_chunks_and_decodes(tiny_model: CausalLM, reference: Reference) -> None:
    cache = nan_cache(tiny_model)
    lengths = [5, 40, 9, 61, 3, 22, 23]
    block_ids = random.Random(5).sample(range(1, 128), 7 * 16)
    sequences = [
        Sequential(random_tokens(index, length + 1), block_ids[index * 16 :][:16])
        for index, length in enumerate(lengths)
    ]
    for sequence, length in zip(sequences, lengths, strict=True):
        compute(tiny_model, cache, [(sequence, length - 12 if length > 30 else length)])
    # Chunks of 12 tokens for the long ones, decodes for the others, in the order of arrival.
    pieces = [(s, 12 if length > 30 else 1) for s, length in zip(sequences, lengths, strict=True)]
    for logits, (sequence, count) in zip(compute(tiny_model, cache, pieces), pieces, strict=True):
        expected = reference(sequence.token_ids[: sequence.num_computed])[-count:]
        assert_close(logits, expected)


def test_shared_prefix_blocks(tiny_model: CausalLM, reference: Reference) -> None:
    """Several sequences read the same blocks, which are computed by one of them only."""
    prefix, cache = random_tokens(11, 12), nan_cache(tiny_model)
    first = Sequential(prefix + random_tokens(12, 5), [9, 4, 7, 1, 2])
    second = Sequential(prefix + random_tokens(13, 1), [9, 4, 7, 3], num_computed=12)
    third = Sequential(prefix[:8] + random_tokens(14, 9), [9, 4, 5, 6, 8], num_computed=8)
    compute(tiny_model, cache, [(first, 12)])
    pieces = [(first, 5), (second, 1), (third, 9)]
    for logits, (sequence, count) in zip(compute(tiny_model, cache, pieces), pieces, strict=True):
        assert_close(logits, reference(sequence.token_ids)[-count:])


def test_prefix_blocks_that_the_same_step_computes(
    tiny_model: CausalLM, reference: Reference
) -> None:
    prefix, cache = random_tokens(15, 8), nan_cache(tiny_model)
    first = Sequential(prefix + random_tokens(16, 3), [2, 1, 3])
    second = Sequential(prefix + random_tokens(17, 2), [2, 1, 4], num_computed=8)
    logits = compute(tiny_model, cache, [(second, 2), (first, 11)])
    assert_close(logits[0], reference(second.token_ids)[-2:])
    assert_close(logits[1], reference(first.token_ids))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_steps(tiny_model: CausalLM, reference: Reference, data: st.DataObject) -> None:
    """Any way to cut sequences into steps and steps into batches gives the same logits."""
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    block_ids = random.Random(data.draw(st.integers(0, 1000))).sample(range(1, 128), 127)
    sequences = [
        Sequential(random_tokens(index, length), block_ids[index * 8 :][:8])
        for index, length in enumerate(lengths)
    ]
    expected = [reference(sequence.token_ids) for sequence in sequences]
    cache = nan_cache(tiny_model)
    while any(sequence.num_computed < len(sequence.token_ids) for sequence in sequences):
        pieces = []
        for index, sequence in enumerate(sequences):
            missing = len(sequence.token_ids) - sequence.num_computed
            if count := missing - data.draw(st.integers(0, missing)):
                pieces.append((index, sequence, sequence.num_computed, count))
        if not pieces:
            continue
        logits = compute(tiny_model, cache, [(sequence, count) for _, sequence, _, count in pieces])
        for rows, (index, _, start, count) in zip(logits, pieces, strict=True):
            assert_close(rows, expected[index][start : start + count])


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 32, "rope_theta": 1e6, "rms_norm_eps": 1e-3},
        {"hidden_size": 60, "intermediate_size": 70, "num_attention_heads": 6},
    ],
)
def test_other_shapes(tmp_path: Path, overrides: dict[str, Any]) -> None:
    directory = tiny_model_dir(tmp_path, seed=2, num_hidden_layers=2, **overrides)
    model, tokens = load_model(directory), random_tokens(1, 21)
    sequence, cache = Sequential(tokens, range(1, 10)), nan_cache(model)
    logits = [compute(model, cache, [(sequence, count)])[0] for count in (9, 1, 1, 10)]
    assert_close(torch.cat(logits), reference_for(directory)(tokens))


def test_decodes_of_very_different_lengths_form_groups(
    tiny_model: CausalLM, reference: Reference
) -> None:
    cache = nan_cache(tiny_model, num_blocks=600)
    lengths = [1, 500, 2, 120, 130, 499, 17]
    block_ids = iter(range(1, 600))
    sequences = [
        Sequential(random_tokens(n, n + 1), [next(block_ids) for _ in range(n // 4 + 1)])
        for n in lengths
    ]
    compute(tiny_model, cache, list(zip(sequences, lengths, strict=True)))
    logits = compute(tiny_model, cache, [(sequence, 1) for sequence in sequences])
    for rows, sequence in zip(logits, sequences, strict=True):
        assert_close(rows, reference(sequence.token_ids)[-1:])
