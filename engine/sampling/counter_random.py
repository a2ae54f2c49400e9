"""Random numbers that are a function of a seed and a position: a counter, not a stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


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
