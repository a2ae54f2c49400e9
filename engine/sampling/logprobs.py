"""Log-probabilities of the tokens that were chosen, and of the likeliest ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.to_device import to_device
from protocol import TokenLogprobs

Wanted = Sequence[int | None]


@dataclass(frozen=True)
class RowLogprobs:
    """Of those rows of a batch for which some are wanted, where the logits are."""

    own: Tensor  # [num_rows] of the chosen tokens
    top_ids: Tensor  # [num_rows, most that are wanted], in the order of (-value, token id)
    top_logprobs: Tensor


@torch.inference_mode()
def row_logprobs(logits: Tensor, tokens: Tensor, wanted: Wanted) -> RowLogprobs | None:
    """As `token_logprobs`, before it is told; None: nothing is wanted. `tokens` is `[num_rows]`."""
    rows = [row for row, number in enumerate(wanted) if number is not None]
    if not rows:
        return None
    at = to_device(torch.tensor(rows), logits.device)
    logprobs = logits[at].float().log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[at][:, None])[:, 0]
    return RowLogprobs(own, *_likeliest(logprobs, max(wanted[row] or 0 for row in rows)))


def told_logprobs(rows: RowLogprobs | None, wanted: Wanted) -> list[TokenLogprobs | None]:
    """Of all rows of the batch."""
    told: list[TokenLogprobs | None] = [None] * len(wanted)
    if rows is None:
        return told
    each = zip(rows.own.tolist(), rows.top_ids.tolist(), rows.top_logprobs.tolist(), strict=True)
    for row, number in enumerate(wanted):
        if number is not None:
            own, ids, logprobs = next(each)
            told[row] = TokenLogprobs(own, tuple(ids[:number]), tuple(logprobs[:number]))
    return told


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], wanted: Wanted
) -> list[TokenLogprobs | None]:
    """For each row of `logits` `[num_rows, vocab_size]`, what `wanted` says.

    None: nothing. A number: the token's own, and so many of the likeliest ones. `logits` are those
    that the model gave.
    """
    chosen = torch.tensor(tokens, device=logits.device)
    return told_logprobs(row_logprobs(logits, chosen, wanted), wanted)


def _likeliest(logprobs: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The largest `number` of each row, in the order of (-value, token id)."""
    number = min(number, logprobs.shape[1])
    columns = logprobs.topk(number, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = logprobs.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return columns.gather(1, order), values
