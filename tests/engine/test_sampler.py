"""The sampler against a slow, obvious one, and the promises about seeds."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling import sample, uniform
from protocol import SamplingParams
from tests.engine.sampling.reference import params, reference_sample, reference_uniform

SAMPLINGS = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.05, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 300, 2000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.01, 0.2, 0.9, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.tuples(SAMPLINGS, st.integers(0, 2000)), min_size=1, max_size=5),
    logits_seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([7, 100, 256, 1000]),
    spread=st.sampled_from([0.1, 1.0, 8.0]),
)
def test_equals_the_reference(
    batch: list[tuple[SamplingParams, int]], logits_seed: int, vocab_size: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(logits_seed)
    logits = torch.randn(len(batch), vocab_size, generator=generator) * spread
    samplings, positions = [p for p, _ in batch], [position for _, position in batch]
    expected = [
        reference_sample(row, p, position)
        for row, (p, position) in zip(logits.tolist(), batch, strict=True)
    ]
    assert sample(logits.clone(), samplings, positions) == expected


@settings(max_examples=30, deadline=None)
@given(p=SAMPLINGS, position=st.integers(0, 50), distinct=st.integers(1, 4))
def test_equal_logits_are_ordered_by_token_id(
    p: SamplingParams, position: int, distinct: int
) -> None:
    """Ties beyond the candidates must not depend on how candidates are found."""
    logits = (torch.arange(1000) * 7 % distinct).float()[None]
    assert sample(logits.clone(), [p], [position]) == [
        reference_sample(logits[0].tolist(), p, position)
    ]


def test_a_token_depends_on_nothing_else_in_the_batch() -> None:
    rng = random.Random(1)
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0)) * 2
    samplings = [
        params(
            temperature=rng.choice([0.0, 0.7, 1.0, 2.0]),
            top_k=rng.choice([0, 3, 400]),
            top_p=rng.choice([1.0, 0.5, 0.95]),
            min_p=rng.choice([0.0, 1e-4, 0.1]),
            seed=rng.randrange(100),
        )
        for _ in range(40)
    ]
    positions = [rng.randrange(1000) for _ in range(40)]
    alone = [
        sample(logits[i : i + 1].clone(), [samplings[i]], [positions[i]])[0] for i in range(40)
    ]
    for count in (2, 7, 40):
        rows = rng.sample(range(40), count)
        together = sample(logits[rows], [samplings[i] for i in rows], [positions[i] for i in rows])
        assert together == [alone[i] for i in rows]


def test_tokens_are_plain_integers() -> None:
    assert [type(t) for t in sample(torch.randn(2, 9), [params(), params()], [0, 1])] == [int, int]


def draw_many(logits: Tensor, p: SamplingParams, count: int) -> Counter[int]:
    rows = logits.expand(count, -1).clone()
    return Counter(sample(rows, [p] * count, list(range(count))))


def chi_square(observed: Counter[int], probabilities: Sequence[float]) -> float:
    """Standard deviations above the mean of the statistic for the right distribution."""
    total = observed.total()
    cells = [(observed[token], p * total) for token, p in enumerate(probabilities) if p > 0]
    assert sum(count for count, _ in cells) == total, "an impossible token was drawn"
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "p",
    [
        params(seed=1),
        params(seed=2, temperature=0.5),
        params(seed=3, temperature=2.0, top_k=8),
        params(seed=4, top_p=0.8),
        params(seed=5, top_k=10, top_p=0.7),
        params(seed=6, min_p=0.2),
        params(seed=7, temperature=1.5, min_p=0.3, top_p=0.9),
        params(seed=8, min_p=0.05, top_k=7),
    ],
)
def test_the_distribution(p: SamplingParams) -> None:
    logits = torch.linspace(2.0, -1.5, 20)
    weights = torch.softmax(logits.double() / p.temperature, -1)
    weights[weights < p.min_p * weights[0]] = 0
    if p.top_k:
        weights[p.top_k :] = 0
    if p.top_p < 1.0:
        sums = weights.cumsum(-1)
        weights[sums - weights >= p.top_p * sums[-1]] = 0
    probabilities = (weights / weights.sum()).tolist()
    assert abs(chi_square(draw_many(logits, p, 20_000), probabilities)) < 4


def test_seeds_give_independent_streams() -> None:
    """Neighbouring seeds at the same position, too, draw as from one distribution."""
    samplings = [params(seed=seed) for seed in range(20_000)]
    logits = torch.linspace(1.0, -1.0, 10)
    drawn = Counter(sample(logits.expand(20_000, -1).clone(), samplings, [3] * 20_000))
    assert abs(chi_square(drawn, torch.softmax(logits.double(), -1).tolist())) < 4


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63), 2**70 + 5])
def test_uniform_is_splitmix64(seed: int) -> None:
    positions = [0, 1, 2, 1000, 2**31]
    expected = [reference_uniform(seed, position) for position in positions]
    assert uniform([seed] * 5, positions).tolist() == expected


def test_uniform_is_uniform_and_uncorrelated() -> None:
    numbers = uniform([99] * 100_000, range(100_000))
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert abs(((counts - 2000) ** 2 / 2000).sum() - 49) < 4 * math.sqrt(2 * 49)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015


@pytest.mark.parametrize(
    "p", [params(top_k=1, seed=5), params(top_p=1e-12, seed=6), params(temperature=1e-6, seed=7)]
)
def test_filters_that_leave_one_token_are_greedy(p: SamplingParams) -> None:
    logits = torch.randn(50, 500, generator=torch.Generator().manual_seed(2))
    greedy = [params(temperature=0.0)] * 50
    expected = sample(logits.clone(), greedy, range(50))
    assert sample(logits.clone(), [p] * 50, range(50)) == expected
    assert expected == logits.argmax(-1).tolist()


def test_stop_tokens_are_impossible_before_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3], logits[0, 4], logits[0, 5] = 9.0, 8.0, 7.0
    p = params(temperature=0.0, min_tokens=2, stop_token_ids=(3,), eos_token_ids=(4,))
    assert [sample(logits.clone(), [p], [position])[0] for position in range(3)] == [5, 5, 3]
