"""Which tokens may be drawn: as transformers' warpers say, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling import draw, sample
from protocol import SamplingParams
from tests.engine.sampling.reference import params

NUM_DRAWS = 20_000


def probabilities(logits: Tensor, p: SamplingParams) -> Tensor:
    """By transformers, in the order that vLLM has: min_p, top_k, top_p."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
    if p.min_p:
        warpers.append(MinPLogitsWarper(p.min_p))
    if p.top_k:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(TopPLogitsWarper(p.top_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].double().softmax(-1)


@pytest.mark.parametrize(
    "p",
    [
        params(temperature=0.7, seed=1),
        params(top_k=5, seed=2),
        params(top_p=0.6, seed=3),
        params(min_p=0.1, seed=4),
        params(min_p=0.02, temperature=1.6, seed=5),
        params(min_p=0.05, top_k=9, top_p=0.8, temperature=1.3, seed=6),
    ],
)
def test_what_is_drawn_is_what_transformers_would_draw(p: SamplingParams) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(7)) * 2
    expected = probabilities(logits, p)
    drawn = sample(logits.expand(NUM_DRAWS, -1), [p] * NUM_DRAWS, range(NUM_DRAWS))
    counts = torch.bincount(torch.tensor(drawn), minlength=40).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert (counts[expected > 1e-3] > 0).all()
    likely = expected * NUM_DRAWS >= 5
    cells = (counts - expected * NUM_DRAWS)[likely] ** 2 / (expected * NUM_DRAWS)[likely]
    freedom = int(likely.sum()) - 1
    assert abs(cells.sum() - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("vocab_size", [300, 49_152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_sums_of_weights_do_not_depend_on_the_order_of_adding(
    vocab_size: int, spread: float
) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    scaled = logits - logits.amax(1, keepdim=True)
    weights = draw._weights(scaled)
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(2))
    total = weights.sum(1)
    assert torch.equal(weights[:, order].sum(1), total)
    assert torch.equal(weights.cumsum(1)[:, -1], total)
    assert torch.equal(torch.stack([row.sum() for row in weights]), total)
    expected = scaled.double().exp().sum(1) * draw._LARGEST
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("min_p", [0.0, 1e-6, 0.5])
def test_a_row_without_a_number_harms_nobody(min_p: float) -> None:
    """A model that has gone mad answers nonsense; the node and the other rows go on."""
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    p = params(seed=3, min_p=min_p, top_p=0.9)
    expected = sample(logits, [p] * 3, [0] * 3)
    logits[1] = torch.nan
    drawn = sample(logits, [p] * 3, [0] * 3)
    assert (drawn[0], drawn[2]) == (expected[0], expected[2])
    assert 0 <= drawn[1] < 1000
