"""The recorded cases are fit for their purpose."""

from __future__ import annotations

import pytest

from tests.reference.cases import (
    NUM_OUTPUT_TOKENS,
    ReferenceCase,
    comparable_share,
    reference_cases,
)


def test_most_positions_can_be_compared() -> None:
    cases = reference_cases()
    assert len(cases) >= 26
    assert len({case.name for case in cases}) == len(cases)
    assert {len(case.output_token_ids) for case in cases} == {NUM_OUTPUT_TOKENS}
    assert comparable_share(cases) >= 0.9


def test_lengths_around_blocks_and_long_prompts_are_covered() -> None:
    lengths = {len(case.prompt_token_ids) for case in reference_cases()}
    assert lengths >= {1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1024, 1500}


def test_some_prompts_share_a_long_prefix() -> None:
    shops = [case for case in reference_cases() if case.name.startswith("shop_")]
    prefixes = {case.prompt_token_ids[:320] for case in shops}
    assert len(shops) >= 4
    assert len(prefixes) == 1


def test_a_case_is_compared_up_to_the_first_small_gap() -> None:
    case = ReferenceCase("x", (1,), (5, 6, 7, 8), (0.5, 0.002, 0.0005, 0.9))
    assert case.comparable_length() == 2
    assert case.comparable_length(threshold=0.01) == 1
    assert case.comparable_length(threshold=0.0) == 4
    case.check([5, 6, 9, 9])
    case.check([5])
    with pytest.raises(AssertionError, match="x: "):
        case.check([5, 7])
