"""How the next token is chosen from logits."""

from engine.sampling.adjuster import LogitAdjuster
from engine.sampling.counter_random import uniform
from engine.sampling.logprobs import RowLogprobs, row_logprobs, token_logprobs, told_logprobs
from engine.sampling.sampler import choose, sample

__all__ = [
    "LogitAdjuster",
    "RowLogprobs",
    "choose",
    "row_logprobs",
    "sample",
    "token_logprobs",
    "told_logprobs",
    "uniform",
]
