"""How the next token is chosen from logits.

Knows nothing of requests or steps: a row of logits, its parameters and the position of the token
in the output decide, whatever else is in the batch. Randomness is a counter, not a stream: the
uniform number of output token i is a hash of (seed, i), so a request that is resumed elsewhere
goes on exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol import SamplingParams

# So many of the likeliest tokens nearly always hold the one that is drawn, and finding them is
# much cheaper than sorting a whole vocabulary.
_NUM_CANDIDATES = 256

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@torch.inference_mode()
def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """The next token of each row of `logits` `[num_rows, vocab_size]` (float32).

    `positions` are those of the new tokens in their outputs, counted from 0. Stop tokens are
    impossible before `min_tokens`: they are masked in `logits` itself.
    """
    _forbid_early_stops(logits, params, positions)
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, p in enumerate(params) if not p.greedy]
    if drawn:
        tokens[drawn] = _draw(
            logits[drawn], [params[row] for row in drawn], [positions[row] for row in drawn]
        )
    chosen: list[int] = tokens.tolist()
    return chosen


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), from 53 bits of SplitMix64.

    SplitMix64 (https://doi.org/10.1145/2660193.2660195) is a counter with a mixing function, so
    that any element of its stream can be had at once: here element `position + 1` of the stream
    that starts at the mixed seed. Seeds count modulo 2**64.
    """
    starts = _mix64(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _GOLDEN_GAMMA)
    counters = np.array(positions, dtype=np.uint64) + np.uint64(1)
    bits = _mix64(starts + counters * _GOLDEN_GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def _forbid_early_stops(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> None:
    for row, (p, position) in enumerate(zip(params, positions, strict=True)):
        if position < p.min_tokens:
            logits[row, [*p.stop_token_ids, *p.eos_token_ids]] = -torch.inf


def _draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Inverse transform sampling over the tokens of each row in the order of (-logit, token id)."""
    filters = _Filters.of(params, positions)
    scaled = logits / filters.temperature
    scaled -= scaled.amax(dim=1, keepdim=True)
    total = scaled.exp().sum(dim=1, keepdim=True, dtype=torch.float64)

    ordered, token_ids = _candidates(scaled)
    ranks, is_known = filters.pick(ordered, total, vocab_size=logits.shape[1])
    tokens = token_ids.gather(1, ranks)
    rest = (~is_known[:, 0]).nonzero()[:, 0]
    if len(rest):
        ordered, token_ids = scaled[rest].sort(dim=1, descending=True, stable=True)
        ranks, _ = filters.rows(rest).pick(ordered, total[rest], vocab_size=logits.shape[1])
        tokens[rest] = token_ids.gather(1, ranks)
    return tokens[:, 0]


def _candidates(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The largest values of each row and their columns, in the order of (-value, column)."""
    count = min(_NUM_CANDIDATES, scaled.shape[1])
    columns = scaled.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = scaled.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


@dataclass(frozen=True)
class _Filters:
    """Which tokens may be drawn, and the number that draws; each tensor is `[num_rows, 1]`."""

    temperature: Tensor
    top_k: Tensor  # 0: all
    top_p: Tensor
    uniform: Tensor  # [0, 1)

    @classmethod
    def of(cls, params: Sequence[SamplingParams], positions: Sequence[int]) -> _Filters:
        return cls(
            temperature=torch.tensor([[p.temperature] for p in params]),
            top_k=torch.tensor([[p.top_k] for p in params]),
            top_p=torch.tensor([[p.top_p] for p in params], dtype=torch.float64),
            uniform=torch.from_numpy(uniform([p.seed for p in params], positions))[:, None],
        )

    def rows(self, rows: Tensor) -> _Filters:
        return _Filters(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.uniform[rows]
        )

    def pick(self, ordered: Tensor, total: Tensor, *, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Ranks `[num_rows, 1]` of the drawn tokens, and whether they can be known.

        `ordered` are the largest of a row's log weights in descending order, all or only some;
        `total` is the sum of all its weights.

            rank          0 ... | ... top_k | ...          the likeliest top_k,
            weight sum    ... top_p |                      of them as many as top_p needs,
                            ^ uniform * sum of those       of them the one where the sum passes
        """
        num_ordered = ordered.shape[1]
        sums = ordered.exp().to(torch.float64).cumsum(dim=1)
        top_k = self.top_k.where(self.top_k > 0, vocab_size).clamp(max=vocab_size)
        sum_k = sums.gather(1, top_k.clamp(max=num_ordered) - 1).where(top_k < vocab_size, total)

        has_top_p = self.top_p < 1.0
        count_p = (sums < self.top_p * sum_k).sum(dim=1, keepdim=True) + 1
        count = torch.minimum(count_p, top_k).where(has_top_p, top_k)
        sum_p = sums.gather(1, count.clamp(max=num_ordered) - 1).where(has_top_p, sum_k)

        ranks = (sums <= self.uniform * sum_p).sum(dim=1, keepdim=True)
        ranks = torch.minimum(ranks, count - 1)
        is_known = (ranks < num_ordered) & ((top_k <= num_ordered) | (top_k == vocab_size))
        is_known &= (count <= num_ordered) | ~has_top_p
        ranks = ranks.clamp(max=num_ordered - 1)
        # The last of some may have equals that are not among them, in front of it by their ids.
        return ranks, is_known & (ordered.gather(1, ranks) > ordered[:, -1:])
