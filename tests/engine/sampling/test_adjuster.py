"""Biases, penalties and min_tokens against the slow reference and against transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.sampling import LogitAdjuster, sample
from engine.sampling.adjuster import adjusted
from protocol import SamplingParams
from tests.engine.sampling.reference import params, reference_adjusted, reference_sample

VOCABULARY = 50

tokens = st.integers(0, VOCABULARY - 1)
token_lists = st.lists(tokens, max_size=40)
penalties = st.sampled_from([-2.0, -0.3, 0.0, 0.0, 0.5, 2.0])
samplings = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 1.3, 10.0]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5).map(
        lambda biases: tuple(biases.items())
    ),
    min_tokens=st.integers(0, 60),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    eos_token_ids=st.just((7,)),
    seed=st.integers(0, 2**64 - 1),
)
sequences = st.tuples(samplings, token_lists, token_lists)


def adjuster_of(
    p: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> LogitAdjuster | None:
    adjuster = LogitAdjuster.of(p, len(prompt))
    if adjuster is not None:
        adjuster.catch_up([*prompt, *output])
    return adjuster


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCABULARY, generator=generator) * 3


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(sequences, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_batch_equals_the_reference(
    batch: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    logits = random_logits(len(batch), seed)
    before = logits.clone()
    chosen = sample(
        logits,
        [p for p, _, _ in batch],
        [len(output) for _, _, output in batch],
        [adjuster_of(*sequence) for sequence in batch],
    )
    assert torch.equal(logits, before)  # log-probabilities are told of those
    for row, (p, prompt, output), token in zip(logits.tolist(), batch, chosen, strict=True):
        expected = reference_adjusted(row, p, prompt, output)
        assert token == reference_sample(expected, p, len(output))


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(sequences, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_the_logits_that_are_left(
    batch: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    rows = [(*sequence, a) for sequence in batch if (a := adjuster_of(*sequence)) is not None]
    if not rows:
        return
    logits = random_logits(len(rows), seed)
    left = adjusted(
        logits.clone(), [row[3] for row in rows], [len(output) for _, _, output, _ in rows]
    )
    for given_row, (p, prompt, output, _), row in zip(logits.tolist(), rows, left, strict=True):
        expected = torch.tensor(reference_adjusted(given_row, p, prompt, output))
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-4)


def test_most_sequences_have_none() -> None:
    assert LogitAdjuster.of(params(temperature=0.5, top_p=0.5, logprobs=3)) is None
    assert LogitAdjuster.of(params(stop_token_ids=(3,), eos_token_ids=(4,))) is None


def test_a_row_is_bitwise_the_same_in_any_batch() -> None:
    rng = random.Random(3)
    sequences = [
        (
            params(
                repetition_penalty=rng.choice([1.0, 1.1, 1.7]),
                frequency_penalty=rng.choice([0.1, 0.7]),
                presence_penalty=rng.random(),
                logit_bias=((rng.randrange(VOCABULARY), rng.random()),),
            ),
            rng.choices(range(VOCABULARY), k=30),
            rng.choices(range(VOCABULARY), k=30),
        )
        for _ in range(20)
    ]
    adjusters = [a for s in sequences if (a := adjuster_of(*s)) is not None]
    logits = random_logits(20, 5)
    together = adjusted(logits.clone(), adjusters, [30] * 20)
    for i in range(20):
        alone = adjusted(logits[i : i + 1].clone(), adjusters[i : i + 1], [30])
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("p", [params(repetition_penalty=1.4), params(frequency_penalty=0.4)])
def test_tokens_one_by_one_count_as_much_as_all_at_once(p: SamplingParams) -> None:
    rng = random.Random(1)
    prompt, output = rng.choices(range(900), k=700), rng.choices(range(900), k=300)
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(0))
    slowly = adjuster_of(p, prompt, [])
    assert slowly is not None
    for count in range(1, 301):
        slowly.catch_up([*prompt, *output[:count]])
    at_once = adjuster_of(p, prompt, output)
    assert at_once is not None
    expected = adjusted(logits.clone(), [at_once], [300])
    assert torch.equal(adjusted(logits.clone(), [slowly], [300]), expected)
    assert not torch.equal(expected, logits)


def test_tokens_that_were_taken_back_do_not_count() -> None:
    """What was sampled from KV that turned out not to be there."""
    p = params(presence_penalty=1.0, repetition_penalty=1.5)
    adjuster = adjuster_of(p, [1, 2], [3, 4, 4])
    assert adjuster is not None
    adjuster.catch_up([1, 2, 3])
    adjuster.catch_up([1, 2, 3, 5])
    logits = random_logits(1, 0)
    expected = adjuster_of(p, [1, 2], [3, 5])
    assert expected is not None
    assert torch.equal(
        adjusted(logits.clone(), [adjuster], [2]), adjusted(logits.clone(), [expected], [2])
    )


# ---------------------------------------------------------------------- transformers


def by_transformers(
    processor: LogitsProcessor, prompt: list[int], output: list[int], logits: torch.Tensor
) -> torch.Tensor:
    return processor(torch.tensor([[*prompt, *output]]), logits.clone())


def left_of(
    p: SamplingParams, prompt: list[int], output: list[int], logits: torch.Tensor
) -> torch.Tensor:
    adjuster = adjuster_of(p, prompt, output)
    assert adjuster is not None
    return adjusted(logits.clone(), [adjuster], [len(output)])


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0, 30.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompt, output, logits = [1, 2, 3, 3, 9], [9, 4, 4, 4], random_logits(1, 1)
    expected = by_transformers(RepetitionPenaltyLogitsProcessor(penalty), prompt, output, logits)
    left = left_of(params(repetition_penalty=penalty), prompt, output, logits)
    torch.testing.assert_close(left, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_min_tokens_is_that_of_transformers(num_output: int) -> None:
    prompt, output, logits = [1, 2], [5] * num_output, random_logits(1, 2)
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [7, 8], device="cpu")
    expected = by_transformers(processor, prompt, output, logits)
    p = params(min_tokens=3, stop_token_ids=(8,), eos_token_ids=(7,))
    assert torch.equal(left_of(p, prompt, output, logits), expected)


def test_the_bias_is_that_of_transformers() -> None:
    logits = random_logits(1, 4)
    processor = SequenceBiasLogitsProcessor([[[3], 5.5], [[11], -100.0]])
    expected = by_transformers(processor, [1], [2], logits)
    p = params(logit_bias=((3, 5.5), (11, -100.0)))
    assert torch.equal(left_of(p, [1], [2], logits), expected)
