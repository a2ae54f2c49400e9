"""What clients ask for that changes logits: early ends forbidden, biases, penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.to_device import to_device
from engine.sampling.token_counts import TokenCounts
from protocol import SamplingParams

_Ids = NDArray[np.int64]
_Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class LogitAdjuster:
    """The changes to the logits of one sequence. Most sequences need none, and have none."""

    min_tokens: int
    ends: _Ids  # impossible before `min_tokens`
    biased: _Ids
    biases: _Numbers
    penalties: _Numbers  # [3]: repetition, frequency, presence
    counts: TokenCounts | None  # None: nothing is penalized

    @classmethod
    def of(cls, params: SamplingParams, num_prompt_tokens: int = 0) -> LogitAdjuster | None:
        """None: `params` leave logits as they are."""
        p = params
        if not (p.min_tokens or p.logit_bias or p.penalizes):
            return None
        penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        with_prompt = p.repetition_penalty != 1.0
        return cls(
            min_tokens=p.min_tokens,
            ends=np.array([*p.stop_token_ids, *p.eos_token_ids], dtype=np.int64),
            biased=np.array([token_id for token_id, _ in p.logit_bias], dtype=np.int64),
            biases=np.array([bias for _, bias in p.logit_bias], dtype=np.float32),
            penalties=np.array(penalties, dtype=np.float32),
            counts=TokenCounts(num_prompt_tokens, with_prompt=with_prompt) if p.penalizes else None,
        )

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """All tokens that the sequence has by now, the prompt's first."""
        if self.counts is not None:
            self.counts.catch_up(token_ids)

    def acts_at(self, position: int) -> bool:
        """Whether it changes logits of the output token at this position."""
        return bool(position < self.min_tokens or len(self.biased)) or self.counts is not None

    def forbidden_at(self, position: int) -> _Ids:
        return self.ends if position < self.min_tokens else self.ends[:0]


def adjusted(
    logits: Tensor, adjusters: Sequence[LogitAdjuster], positions: Sequence[int]
) -> Tensor:
    """`logits` `[num_rows, vocab_size]`, changed in place: row by row as its adjuster says.

    Each kind of change is one operation on the cells that it concerns, of all rows at once.
    """
    cells = _Cells(logits)
    pairs = list(zip(adjusters, positions, strict=True))
    forbidden = cells.at([a.forbidden_at(position) for a, position in pairs])
    cells.flat[forbidden] = -torch.inf
    biased = cells.at([a.biased for a in adjusters])
    # Not `+=` by index, which would lose one of two biases of a token: there are no two.
    cells.flat[biased] += cells.numbers([a.biases for a in adjusters])
    _penalize(cells, [a.counts for a in adjusters], [a.penalties for a in adjusters])
    return logits


def _penalize(
    cells: _Cells, counts: Sequence[TokenCounts | None], penalties: Sequence[_Numbers]
) -> None:
    """Repetition as in CTRL (https://arxiv.org/abs/1909.05858), the others as OpenAI has them."""
    held = [_NO_IDS if c is None else c.token_ids for c in counts]
    at = cells.at(held)
    if not len(at):
        return
    lengths = [len(ids) for ids in held]
    each = cells.numbers(
        [np.repeat(p[None], n, 0) for p, n in zip(penalties, lengths, strict=True)]
    )
    repetition, frequency, presence = each.unbind(dim=1)
    times = cells.numbers([_NO_NUMBERS if c is None else c.output_counts for c in counts])
    values = cells.flat[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * times
    values -= presence * (times > 0)
    cells.flat[at] = values


_NO_IDS: _Ids = np.empty(0, dtype=np.int64)
_NO_NUMBERS: _Numbers = np.empty(0, dtype=np.float32)


class _Cells:
    """A matrix by the numbers of its cells."""

    def __init__(self, matrix: Tensor) -> None:
        self.flat = matrix.view(-1)
        self._width = matrix.shape[1]

    def at(self, columns: Sequence[_Ids]) -> Tensor:
        """The cells in these columns of each row."""
        cells = [row * self._width + ids for row, ids in enumerate(columns)]
        return to_device(torch.from_numpy(np.concatenate(cells)), self.flat.device)

    def numbers(self, values: Iterable[_Numbers]) -> Tensor:
        """What belongs to those, row after row."""
        return to_device(torch.from_numpy(np.concatenate(list(values))), self.flat.device)
