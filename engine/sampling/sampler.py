"""How the next token is chosen from logits.

Knows nothing of requests or steps: a row of logits, its parameters, the tokens that it has and the
position of the next one decide, whatever else is in the batch.

The order of things is vLLM's (the docstring of its `v1/sample/sampler.py`), so that the same
parameters mean the same distribution:

    logits ─► log-probabilities to tell, if any (`logprobs.py`)
       ├─► min_tokens, logit_bias, then repetition, frequency and presence penalties (`adjuster.py`)
       └─► the largest, if greedy; else temperature, min_p, top_k, top_p, and one of the rest by
           chance (`draw.py`)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.adjuster import LogitAdjuster, adjusted
from engine.sampling.draw import draw
from engine.sampling.to_device import to_device
from protocol import SamplingParams

Adjusters = Sequence[LogitAdjuster | None]


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    adjusters: Adjusters | None = None,
) -> list[int]:
    """As `choose`, for who waits for the tokens."""
    chosen: list[int] = choose(logits, params, positions, adjusters).tolist()
    return chosen


@torch.inference_mode()
def choose(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    adjusters: Adjusters | None = None,
) -> Tensor:
    """The next tokens `[num_rows]` of `logits` `[num_rows, vocab_size]` (float32), which stay.

    `positions` are those of the new tokens in their outputs, counted from 0. `adjusters` have seen
    all tokens of their rows; by default rows have none. Stop tokens are impossible before
    `min_tokens`. Of equal logits the lowest token id counts as the largest.
    """
    if adjusters is None:
        adjusters = [LogitAdjuster.of(p) for p in params]
    acting = [i for i, a in enumerate(adjusters) if a is not None and a.acts_at(positions[i])]
    if acting:
        its = [a for i in acting if (a := adjusters[i]) is not None]
        rows = _index(acting, logits)
        changed = adjusted(logits[rows], its, [positions[i] for i in acting])
        if len(acting) == len(logits):
            logits = changed
        else:
            logits = logits.index_copy(0, rows, changed)
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if not drawn:
        return logits.argmax(dim=-1)
    if len(drawn) == len(logits):
        return draw(logits, params, positions)
    tokens = logits.argmax(dim=-1)
    rows = _index(drawn, logits)
    tokens[rows] = draw(logits[rows], [params[i] for i in drawn], [positions[i] for i in drawn])
    return tokens


def _index(rows: list[int], like: Tensor) -> Tensor:
    return to_device(torch.tensor(rows), like.device)
