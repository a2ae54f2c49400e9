"""How fast a node prefills, measured on its own steps."""

from __future__ import annotations

_MIN_TOKENS = 16  # a step with fewer says more about decoding
_WEIGHT = 0.2  # of the newest step


class PrefillRate:
    """A moving average of prompt tokens per second of step time; decodes in the step included."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # 0: nothing was measured yet

    def add(self, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens < _MIN_TOKENS or seconds <= 0:
            return
        rate = prompt_tokens / seconds
        first = self.tokens_per_s == 0
        self.tokens_per_s = rate if first else (1 - _WEIGHT) * self.tokens_per_s + _WEIGHT * rate
