"""Sampling, slow and obvious: one row at a time, in float64, by loops over the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from protocol import SamplingParams

MASK = 2**64 - 1


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100} | changes)  # type: ignore[arg-type]


def reference_uniform(seed: int, position: int) -> float:
    """SplitMix64 in plain integers."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        return z ^ z >> 31

    gamma = 0x9E3779B97F4A7C15
    start = mix((seed % 2**64 + gamma) & MASK)
    return (mix((start + (position + 1) * gamma) & MASK) >> 11) / 2**53


def reference_adjusted(
    logits: Sequence[float], p: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """What is left of the logits before the output token at position `len(output)` is chosen."""
    adjusted = list(logits)
    if len(output) < p.min_tokens:
        for token in (*p.stop_token_ids, *p.eos_token_ids):
            adjusted[token] = -math.inf
    for token, bias in p.logit_bias:
        adjusted[token] += bias
    for token in range(len(adjusted)):
        if token in prompt or token in output:
            if adjusted[token] > 0:
                adjusted[token] /= p.repetition_penalty
            else:
                adjusted[token] *= p.repetition_penalty
        count = list(output).count(token)
        adjusted[token] -= p.frequency_penalty * count
        adjusted[token] -= p.presence_penalty * (count > 0)
    return adjusted


def reference_weights(logits: Sequence[float], p: SamplingParams) -> dict[int, float]:
    """How likely each token is that may be drawn, in the order of (-logit, token id)."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    top = logits[order[0]]
    weights = {token: math.exp((logits[token] - top) / p.temperature) for token in order}
    order = [token for token in order if weights[token] >= p.min_p]
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1.0:
        needed, total = p.top_p * math.fsum(weights[token] for token in order), 0.0
        for count, token in enumerate(order, start=1):
            total += weights[token]
            if total >= needed:
                order = order[:count]
                break
    return {token: weights[token] for token in order}


def reference_sample(logits: Sequence[float], p: SamplingParams, position: int) -> int:
    """The token that is drawn from logits that are adjusted already."""
    if p.greedy:
        return min(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = reference_weights(logits, p)
    target = reference_uniform(p.seed, position) * math.fsum(weights.values())
    total = 0.0
    for token, weight in weights.items():
        total += weight
        if total > target:
            return token
    return token
