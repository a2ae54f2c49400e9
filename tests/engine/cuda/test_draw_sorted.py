"""On a GPU tokens are drawn by sorting whole rows, which gives the same tokens."""

from __future__ import annotations

import pytest
import torch

import engine.sampling.draw as draw
from engine.sampling import choose
from protocol import SamplingParams


@pytest.mark.parametrize("vocab_size", [300, 5_000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_the_tokens_are_those_of_the_way_of_a_cpu(vocab_size: int, spread: float) -> None:
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    logits = (logits * 8).round() / 8  # with many equals
    params = [
        SamplingParams(
            temperature=0.5 + n % 3,
            top_p=(1.0, 0.9, 0.3)[n % 3],
            top_k=(0, 5, 400)[n // 3 % 3],
            min_p=(0.0, 0.0, 0.2)[n // 9 % 3],
            seed=n,
        )
        for n in range(24)
    ]
    positions = list(range(24))
    filters = draw._Filters.of(params, positions, logits.device)
    scaled = logits / filters.temperature
    scaled -= scaled.amax(dim=1, keepdim=True)
    total = draw._weights(scaled).sum(dim=1, keepdim=True).to(torch.float64)
    drawn = draw._draw_sorted(scaled, total, filters)
    assert drawn.tolist() == choose(logits, params, positions).tolist()
