"""From the fields that say how tokens are chosen to `SamplingParams`.

Ranges of single numbers are checked with the body (`openai.py`); here is what depends on the model,
on this server's limits, or on two fields.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gateway.config import GatewayConfig
from gateway.openai import ChatBody, CompletionBody, GenerationBody
from gateway.served_model import ServedModel
from gateway.token_ids import check_token_ids
from protocol import InvalidRequest, SamplingParams

_SEED_BITS = 63
_NUM_SEEDS = 2**_SEED_BITS
_MAX_BIAS = 100
_TOKEN_ID = re.compile(r"[0-9]{1,9}")


class SamplingParser:
    """Parses for one model. Raises `InvalidRequest`, which names the field and the limit."""

    def __init__(self, model: ServedModel, config: GatewayConfig) -> None:
        self._model = model
        self._config = config

    def parse(
        self, fields: CompletionBody | ChatBody, max_tokens: Sequence[int]
    ) -> list[SamplingParams]:
        """One for each prompt, given how many tokens may follow it."""
        for limit in max_tokens:
            if fields.min_tokens > limit:
                raise InvalidRequest(
                    "min_tokens",
                    f"min_tokens: {fields.min_tokens} are more than the {limit} that may follow",
                )
        params = SamplingParams(
            temperature=fields.temperature,
            top_k=max(0, fields.top_k),
            top_p=fields.top_p,
            min_p=fields.min_p,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            repetition_penalty=fields.repetition_penalty,
            logit_bias=self._logit_bias(fields.logit_bias),
            min_tokens=fields.min_tokens,
            stop_token_ids=self._stop_token_ids(fields.stop_token_ids),
            eos_token_ids=() if fields.ignore_eos else self._model.tokenizer.eos_token_ids,
            logprobs=_logprobs(fields),
        )
        return [replace(params, max_tokens=limit, seed=_seed(fields)) for limit in max_tokens]

    def _logit_bias(self, biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        _check_count("logit_bias", len(biases), self._config.max_logit_bias)
        by_token = {self._biased_token(name): bias for name, bias in biases.items()}
        if len(by_token) < len(biases):
            raise InvalidRequest("logit_bias", "logit_bias: a token is there twice")
        for token_id, bias in by_token.items():
            if abs(bias) > _MAX_BIAS:
                raise InvalidRequest(
                    "logit_bias",
                    f"logit_bias: {bias:g}, for token {token_id}, is not from -{_MAX_BIAS}"
                    f" to {_MAX_BIAS}",
                )
        return tuple(by_token.items())

    def _biased_token(self, name: str) -> int:
        size = self._model.tokenizer.vocab_size
        token_id = int(name) if _TOKEN_ID.fullmatch(name) else size
        if token_id >= size:
            raise InvalidRequest(
                "logit_bias",
                f"logit_bias: {name!r} is no token id of the vocabulary of {size} tokens",
            )
        return token_id

    def _stop_token_ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        _check_count("stop_token_ids", len(token_ids), self._config.max_stop_token_ids)
        check_token_ids("stop_token_ids", token_ids, self._model.tokenizer.vocab_size)
        return token_ids


def sibling_of(params: SamplingParams, number: int) -> SamplingParams:
    """For choice `number` of a prompt, if `params` are those of the first, which is number 0.

    The first has the seed that was given, or drawn, and each other the next one: choice i is what
    a request of one choice makes of seed + i.
    """
    return replace(params, seed=(params.seed + number) % _NUM_SEEDS)


def _seed(fields: GenerationBody) -> int:
    """One is always set: a retry on another node then goes on with the same tokens."""
    return secrets.randbits(_SEED_BITS) if fields.seed is None else fields.seed % _NUM_SEEDS


def _logprobs(fields: CompletionBody | ChatBody) -> int | None:
    """The number of likeliest tokens to tell of each. A chat asks in two fields, others in one."""
    if isinstance(fields, ChatBody):
        if fields.top_logprobs and not fields.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs: logprobs must be true for them")
        return fields.top_logprobs if fields.logprobs else None
    if fields.logprobs is True:
        raise InvalidRequest("logprobs", "logprobs: a number from 0 to 20 is needed, not true")
    return None if fields.logprobs is False else fields.logprobs


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(field, f"{field}: {count} entries, more than {limit}")
