"""How the next token is chosen."""

from __future__ import annotations

import msgspec

GREEDY_TEMPERATURE = 1e-5  # below this, dividing logits by it would overflow: it is greedy


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to know to sample and to end a request.

    Stop *strings* are not here: they are a matter of text, which only the gateway knows.
    `max_tokens` and `min_tokens` count all output tokens, forced ones of a retry included.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0  # always set: token i depends on (seed, i, logits) only
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()  # empty when the client asked to ignore eos

    @property
    def greedy(self) -> bool:
        """Whether the token is simply the one with the largest logit."""
        return self.temperature < GREEDY_TEMPERATURE
