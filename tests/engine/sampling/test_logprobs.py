"""Log-probabilities against log_softmax in float64, for rows that ask for different numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import token_logprobs


@settings(max_examples=50, deadline=None)
@given(
    wanted=st.lists(st.sampled_from([None, 0, 1, 2, 5, 20]), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([7, 100, 3000]),
)
def test_each_row_gets_what_it_asks_for(
    wanted: list[int | None], seed: int, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(wanted), vocab_size, generator=generator) * 4
    tokens = torch.randint(vocab_size, (len(wanted),), generator=generator).tolist()
    expected = logits.double().log_softmax(-1)
    told = token_logprobs(logits, tokens, wanted)
    for row, (number, entry) in enumerate(zip(wanted, told, strict=True)):
        if number is None:
            assert entry is None
            continue
        assert entry is not None
        order = sorted(range(vocab_size), key=lambda t: (-logits[row, t].item(), t))[:number]
        assert entry.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-4)
        assert list(entry.top_token_ids) == order
        assert entry.top_logprobs == pytest.approx(expected[row, order].tolist(), abs=1e-4)


def test_equal_ones_are_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(1, 30)
    logits[0, [4, 9, 17]] = 2.0
    (told,) = token_logprobs(logits, [9], [3])
    assert told is not None
    assert told.top_token_ids == (4, 9, 17)
    assert len(set(told.top_logprobs)) == 1
    assert told.logprob == told.top_logprobs[1]


def test_a_row_is_bitwise_the_same_in_any_batch() -> None:
    logits = torch.randn(9, 49_152, generator=torch.Generator().manual_seed(3)) * 3
    tokens = logits.argmax(-1).tolist()
    together = token_logprobs(logits, tokens, [3] * 9)
    alone = [token_logprobs(logits[i : i + 1], tokens[i : i + 1], [3])[0] for i in range(9)]
    assert together == alone


def test_nobody_asks() -> None:
    assert token_logprobs(torch.zeros(2, 5), [0, 1], [None, None]) == [None, None]
