"""Drawing one of the tokens that temperature, min_p, top_k and top_p leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.counter_random import uniform
from engine.sampling.to_device import to_device
from protocol import SamplingParams

# So many of the likeliest tokens mostly hold the one that is drawn, or so many nearly always, and
# finding them is much cheaper than sorting a whole vocabulary.
_NUM_CANDIDATES = (256, 4096)

# Tokens are looked through in groups: only groups with a large maximum can hold candidates.
_GROUP = 16

# Weights are whole numbers, the largest of a row being this one. Up to 2**19 of them have a sum
# that float64 holds exactly, and an exact sum does not depend on the order in which threads or a
# GPU add: that order depends on the size of the batch.
_LARGEST = 2.0**34


def draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Inverse transform sampling over the tokens of each row in the order of (-logit, token id).

    `logits` is `[num_rows, vocab_size]`, the result `[num_rows]`. A token that is less than about
    1e-10 times as likely as the likeliest one is never drawn.
    """
    filters = _Filters.of(params, positions, logits.device)
    scaled = logits / filters.temperature
    scaled -= scaled.amax(dim=1, keepdim=True)
    total = _weights(scaled).sum(dim=1, keepdim=True).to(torch.float64)
    if logits.device.type == "cuda":
        return _draw_sorted(scaled, total, filters)

    tokens = torch.empty(len(logits), dtype=torch.int64)
    rest = torch.arange(len(logits))
    for number in (*_NUM_CANDIDATES, logits.shape[1]):
        ordered, token_ids = _candidates(scaled, number)
        ranks, is_known = filters.pick(ordered, total, vocab_size=logits.shape[1])
        tokens[rest] = token_ids.gather(1, ranks)[:, 0]
        unknown = (~is_known[:, 0]).nonzero()[:, 0]
        if not len(unknown):
            break
        rest, scaled, total = rest[unknown], scaled[unknown], total[unknown]
        filters = filters.rows(unknown)
    return tokens


def _draw_sorted(scaled: Tensor, total: Tensor, filters: _Filters) -> Tensor:
    """By sorting whole rows, which decides all: whether some are left would be known too late on
    the host, for which the device would have to stand still.
    """
    ordered, token_ids = scaled.sort(dim=1, descending=True, stable=True)
    ranks, _ = filters.pick(ordered, total, vocab_size=scaled.shape[1])
    return token_ids.gather(1, ranks)[:, 0]


def _weights(scaled: Tensor) -> Tensor:
    """What logits that are at most 0 weigh: int64, from 0 to the largest weight."""
    return scaled.exp().mul_(_LARGEST).to(torch.int64)


def _candidates(scaled: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row and their columns, in the order of (-value, column).

    Whatever is larger than the last of them is among them: were it in a group that was left out,
    the groups that were not would all have a maximum that is as large.
    """
    if number >= scaled.shape[1]:
        return scaled.sort(dim=1, descending=True, stable=True)
    columns = _in_large_groups(scaled, number)
    largest = scaled.gather(1, columns).topk(number, dim=1, sorted=False).indices
    columns = columns.gather(1, largest).sort(dim=1).values
    values, order = scaled.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _in_large_groups(scaled: Tensor, number: int) -> Tensor:
    """The columns of the `number` groups with the largest maxima, and those outside whole groups.

    A group is every n-th column, n being the number of groups: so maxima are those of whole rows of
    n numbers, which is fast.
    """
    num_rows, vocab_size = scaled.shape
    num_groups = vocab_size // _GROUP
    columns = torch.arange(vocab_size)
    if num_groups <= number:
        return columns.expand(num_rows, -1)
    end = num_groups * _GROUP
    maxima = scaled[:, :end].view(num_rows, _GROUP, num_groups).amax(dim=1)
    groups = maxima.topk(number, dim=1, sorted=False).indices
    inside = groups[:, None, :] + columns[:end:num_groups, None]
    return torch.cat([inside.flatten(1), columns[end:].expand(num_rows, -1)], dim=1)


@dataclass(frozen=True)
class _Filters:
    """Which tokens may be drawn, and the number that draws; each tensor is `[num_rows, 1]`."""

    temperature: Tensor
    top_k: Tensor  # 0: all
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor  # [0, 1)

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device
    ) -> _Filters:
        numbers = torch.tensor([[p.top_p, p.min_p] for p in params], dtype=torch.float64)
        chance = torch.from_numpy(uniform([p.seed for p in params], positions))
        return cls(
            temperature=to_device(torch.tensor([[p.temperature] for p in params]), device),
            top_k=to_device(torch.tensor([[p.top_k] for p in params]), device),
            top_p=to_device(numbers[:, :1], device),
            min_p=to_device(numbers[:, 1:], device),
            uniform=to_device(chance[:, None], device),
        )

    def rows(self, rows: Tensor) -> _Filters:
        return _Filters(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.uniform[rows],
        )

    def pick(self, ordered: Tensor, total: Tensor, *, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Ranks `[num_rows, 1]` of the drawn tokens, and whether they can be known.

        `ordered` are the largest of a row's log weights in descending order, all or only some;
        `total` is the sum of all its weights.

            rank          0 ... | ... min_p | ... top_k | ...   those with min_p of the first's
            weight sum    ... top_p |                           weight, the likeliest top_k of
                            ^ uniform * sum of those            them, of these as many as top_p
                                                                needs; the one where the sum passes
        """
        num_ordered = ordered.shape[1]
        sums = _weights(ordered).cumsum(dim=1).to(torch.float64)
        limit, is_known = self._limit(ordered, vocab_size)
        sum_k = sums.gather(1, limit.clamp(max=num_ordered) - 1).where(limit < vocab_size, total)

        has_top_p = self.top_p < 1.0
        count_p = (sums < self.top_p * sum_k).sum(dim=1, keepdim=True) + 1
        count = torch.minimum(count_p, limit).where(has_top_p, limit)
        sum_p = sums.gather(1, count.clamp(max=num_ordered) - 1).where(has_top_p, sum_k)

        ranks = (sums <= self.uniform * sum_p).sum(dim=1, keepdim=True)
        ranks = torch.minimum(ranks, count - 1)
        is_known = is_known & (ranks < num_ordered) & ((count <= num_ordered) | ~has_top_p)
        ranks = ranks.clamp(max=num_ordered - 1)
        if num_ordered == vocab_size:
            return ranks, is_known
        # The last of some may have equals that are not among them, in front of it by their ids.
        return ranks, is_known & (ordered.gather(1, ranks) > ordered[:, -1:])

    def _limit(self, ordered: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """How many of the likeliest tokens min_p and top_k leave, and whether that is known."""
        num_ordered = ordered.shape[1]
        top_k = self.top_k.where(self.top_k > 0, vocab_size).clamp(max=vocab_size)
        num_likely = (ordered.exp() >= self.min_p).sum(dim=1, keepdim=True).clamp(min=1)
        # If all in sight are likely enough, there may be more.
        ends_here = (self.min_p > 0) & ((num_likely < num_ordered) | (num_ordered == vocab_size))
        limit = torch.minimum(top_k, num_likely).where(ends_here, top_k)
        whole = (limit == vocab_size) & (self.min_p == 0)
        return limit, (limit <= num_ordered) | whole
