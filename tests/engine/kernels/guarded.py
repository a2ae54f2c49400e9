"""Inputs whose surroundings would show in a result that was computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GUARD = 77  # numbers before and after: more than a cache line, and no whole vectors


def guarded(values: Tensor) -> Tensor:
    """The same numbers, contiguous, amid NaNs (or the largest number), and aligned to nothing."""
    surroundings = math.nan if values.is_floating_point() else torch.iinfo(values.dtype).max
    memory = torch.full((values.numel() + 2 * GUARD,), surroundings, dtype=values.dtype)
    view = memory[GUARD:-GUARD].view(values.shape)
    return view.copy_(values)


def part_of_wider(values: Tensor, before: int = 5, after: int = 3) -> Tensor:
    """`[num_tokens, num_heads, head_dim]` as some of the heads of a tensor full of NaN."""
    num_tokens, num_heads, head_dim = values.shape
    wide = torch.full((num_tokens, before + num_heads + after, head_dim), math.nan)
    return guarded(wide)[:, before : before + num_heads].copy_(values)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    different = (bits(actual) != bits(expected)).nonzero()
    assert len(different) == 0, f"{len(different)} differ, first at {different[0].tolist()}"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many, in this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
