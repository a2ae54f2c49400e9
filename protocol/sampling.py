"""How the next token is chosen, and what is told of the choice."""

from __future__ import annotations

from typing import Annotated

import msgspec

GREEDY_TEMPERATURE = 1e-5  # below this, dividing logits by it would overflow: it is greedy

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to know to sample and to end a request.

    Stop *strings* are not here: they are a matter of text, which only the gateway knows.
    `max_tokens` and `min_tokens` count all output tokens, forced ones of a retry included.
    Penalties do, too: what was generated elsewhere is as much output as what is generated here.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0  # 0 is greedy
    top_k: _Count = 0  # 0: all
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # of the likeliest one's probability
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0  # 1: none
    logit_bias: tuple[tuple[int, _Bias], ...] = ()  # token ids, and what their logits get
    seed: int = 0  # always set: token i depends on (seed, i, logits) only
    max_tokens: int = 16
    min_tokens: _Count = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()  # empty when the client asked to ignore eos
    # How many of the likeliest tokens are told with each output token. 0: only how likely that one
    # was; None: not even that.
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the token is simply the one with the largest logit."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens a sequence has."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural logarithms of probabilities at one place of an output.

    They are the model's own: of the logits as they were before anything that a client asked for.
    `top_token_ids` are the likeliest tokens, in descending order; `top_logprobs` are theirs.
    """

    logprob: float  # of the token that was chosen
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
