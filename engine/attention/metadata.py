"""Which tokens a step computes, and where their sequences lie in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache_config import NULL_BLOCK_ID


@dataclass(frozen=True)
class AttentionMetadata:
    """The packed batch of one step, made once and read by every layer.

        packed tokens   | sequence 0 | sequence 1        | sequence 2 |
        query_starts    0            3                   9            10
        one sequence    |  computed before  |  query_len  |
                        0                              context_len

    A slot is a place for one token: block id * block_size + offset in the block.
    """

    query_lens: tuple[int, ...]  # tokens computed now, at least 1
    context_lens: tuple[int, ...]  # tokens visible to the last query, query_len included
    query_starts: tuple[int, ...]  # of each sequence in the packed tokens; the end at last
    block_tables: Tensor  # [num_seqs, max_blocks]; filled up with the null block
    block_size: int
    positions: Tensor  # [num_tokens] index of each token in its sequence
    slot_mapping: Tensor  # [num_tokens] where its keys and values go

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
    ) -> AttentionMetadata:
        query_starts = [0]
        for length in query_lens:
            query_starts.append(query_starts[-1] + length)
        lengths = torch.tensor(query_lens)
        # position - index in the packed tokens, which is the same for all tokens of a sequence
        shifts = torch.tensor(context_lens) - torch.tensor(query_starts[1:])
        sequence_of = torch.repeat_interleave(torch.arange(len(query_lens)), lengths)
        positions = torch.arange(query_starts[-1]) + shifts[sequence_of]
        tables = _padded(block_tables)
        return cls(
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            query_starts=tuple(query_starts),
            block_tables=tables,
            block_size=block_size,
            positions=positions,
            slot_mapping=_slots(tables[sequence_of], positions[:, None], block_size)[:, 0],
        )

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    def context_slots(self, sequences: Sequence[int]) -> Tensor:
        """Slots `[num_sequences, longest context]` of all visible tokens of these sequences.

        A shorter sequence is filled up with its first slot: that one is always written, so
        that reading it yields finite numbers.
        """
        lengths = torch.tensor([self.context_lens[index] for index in sequences])
        positions = torch.arange(int(lengths.max())).expand(len(lengths), -1)
        positions = positions.where(positions < lengths[:, None], 0)
        return _slots(self.block_tables[list(sequences)], positions, self.block_size)


def _padded(block_tables: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, block_tables))
    return torch.tensor(
        [[*table, *[NULL_BLOCK_ID] * (width - len(table))] for table in block_tables]
    )


def _slots(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots of `positions` `[n, k]`, each row looked up in its own row of `block_tables`."""
    blocks = block_tables.gather(1, positions // block_size)
    return blocks * block_size + positions % block_size
