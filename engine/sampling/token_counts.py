"""Which tokens a sequence has, and how often each is in its output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 256


class TokenCounts:
    """Grows with its sequence, by one look-up a token.

    Only tokens that occur are held, which are few compared with a vocabulary:

        token_ids       17   4   923   …     in the order in which they came first
        output_counts    2   0     1   …     0: in the prompt only
    """

    def __init__(self, num_prompt_tokens: int, *, with_prompt: bool) -> None:
        """`with_prompt`: also tokens that only the prompt has."""
        self._num_prompt = num_prompt_tokens
        self._first = 0 if with_prompt else num_prompt_tokens
        self._forget()

    def _forget(self) -> None:
        self._num_seen = self._first
        self._places: dict[int, int] = {}
        self._token_ids = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.float32)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._token_ids[: len(self._places)]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._places)]

    def catch_up(self, all_token_ids: Sequence[int]) -> None:
        """The sequence has these tokens now: more than before, or again fewer."""
        if len(all_token_ids) < self._num_seen:
            self._forget()
        for index in range(self._num_seen, len(all_token_ids)):
            place = self._place(all_token_ids[index])
            self._counts[place] += index >= self._num_prompt
        self._num_seen = max(self._num_seen, len(all_token_ids))

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token_id
        return place
