"""The tokens of a step side by side, as arrays that go to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cuda.seats import Seats
from engine.cuda.staging import Arrays
from engine.kv_cache import KVCache
from engine.kv_cache_config import NULL_BLOCK_ID
from engine.runner_request import RunnerRequest, RunnerRequests

Number = TypeVar("Number", np.int32, np.int64)
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class PackedStep:
    """`engine.attention.AttentionMetadata` draws the geometry; here it is in numpy.

    A token that was sampled by a step whose tokens the host does not have yet is negative here,
    and is taken from the seat of its request on the device.
    """

    token_ids: Int64s  # [num_tokens]
    token_seats: Int64s  # [num_tokens] of each token's request
    positions: Int64s  # [num_tokens] in its sequence
    slots: Int64s  # [num_tokens] in the KV cache: block id * block_size + offset
    query_lens: Int32s  # [num_seqs]
    context_lens: Int32s  # [num_seqs] with the tokens of this step
    block_tables: Int32s  # [num_seqs, longest]; what is behind the end of one is arbitrary
    sampled: tuple[RunnerRequest, ...]
    sampled_rows: Int64s  # of the packed tokens
    sampled_seats: Int64s

    @classmethod
    def of(
        cls,
        num_scheduled_tokens: Mapping[str, int],
        requests: RunnerRequests,
        seats: Seats,
        block_size: int,
    ) -> PackedStep:
        chosen = [requests[request_id] for request_id in num_scheduled_tokens]
        query_lens = np.fromiter(num_scheduled_tokens.values(), np.int32, len(chosen))
        computed = np.fromiter((r.num_computed_tokens for r in chosen), np.int64, len(chosen))
        lengths = np.fromiter((len(r.token_ids) for r in chosen), np.int64, len(chosen))
        at = np.fromiter(map(seats.__getitem__, num_scheduled_tokens), np.int64, len(chosen))
        ends = computed + query_lens
        assert (ends <= lengths).all(), "a token to compute has not been sampled"
        positions = _ranges(computed, query_lens)
        sequence_of = np.repeat(np.arange(len(chosen)), query_lens)
        tables = seats.tables(at, int(-(-ends.max() // block_size)))
        blocks = tables[sequence_of, positions // block_size].astype(np.int64)
        samples = np.flatnonzero(ends == lengths)
        return cls(
            token_ids=_tokens(chosen, computed, ends),
            token_seats=at[sequence_of],
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            query_lens=query_lens,
            context_lens=ends.astype(np.int32),
            block_tables=tables,
            sampled=tuple(chosen[i] for i in samples.tolist()),
            sampled_rows=(np.cumsum(query_lens, dtype=np.int64) - 1)[samples],
            sampled_seats=at[samples],
        )

    @classmethod
    def nothing(cls) -> PackedStep:
        """Of no sequence."""
        none, few = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        tables = np.empty((0, 1), dtype=np.int32)
        return cls(none, none, none, none, few, few, tables, (), none, none)

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def is_decode(self) -> bool:
        """Whether there is one token of each sequence."""
        return len(self.token_ids) == self.num_seqs

    def padded(self, num_seqs: int) -> PackedStep:
        """A decode with sequences of one token, written to the null block, that nobody samples."""
        assert self.is_decode
        extra = num_seqs - self.num_seqs
        if not extra:
            return self
        return replace(
            self,
            token_ids=_filled(self.token_ids, extra, 0),
            token_seats=_filled(self.token_seats, extra, 0),
            positions=_filled(self.positions, extra, 0),
            slots=_filled(self.slots, extra, NULL_BLOCK_ID),
            query_lens=_filled(self.query_lens, extra, 1),
            context_lens=_filled(self.context_lens, extra, 1),
            block_tables=np.pad(
                self.block_tables, ((0, extra), (0, 0)), constant_values=NULL_BLOCK_ID
            ),
        )

    def inputs(self, kv_cache: KVCache) -> Arrays:
        """What the model reads, whatever the attention. All but `sampled_*` has fixed shapes."""
        key_rows = kv_cache.key_rows(torch.from_numpy(self.slots)).numpy()
        return {
            "token_ids": self.token_ids,
            "token_seats": self.token_seats,
            "positions": self.positions,
            "key_rows": key_rows,
            "value_rows": key_rows + kv_cache.config.block_size,
            "query_starts": _starts(self.query_lens),
            "context_lens": self.context_lens,
            "context_starts": _starts(self.context_lens),
        }

    def outputs(self) -> Arrays:
        """Where there is something to sample, and where the tokens go."""
        return {"sampled_rows": self.sampled_rows, "sampled_seats": self.sampled_seats}


def _tokens(requests: list[RunnerRequest], starts: Int64s, ends: Int64s) -> Int64s:
    spans = zip(requests, starts.tolist(), ends.tolist(), strict=True)
    tokens = chain.from_iterable(r.token_ids[start:end] for r, start, end in spans)
    return np.fromiter(tokens, np.int64, int((ends - starts).sum()))


def _ranges(starts: Int64s, lengths: Int32s) -> Int64s:
    """The numbers from each start on, as many as its length says, one after the other."""
    firsts = np.cumsum(lengths, dtype=np.int64) - lengths
    positions: Int64s = np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)
    return positions


def _starts(lengths: Int32s) -> Int32s:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _filled(array: NDArray[Number], count: int, value: int) -> NDArray[Number]:
    return np.concatenate((array, np.full(count, value, dtype=array.dtype)))
