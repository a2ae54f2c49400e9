"""From a body to what is to be done: parsed once, and valid from here on.

Texts become token ids, names become numbers, defaults are filled in, and what can never be served
is refused. What is left is a `GenerationRequest` for each choice, and what only the gateway knows:
stop strings, and how the client wants its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.openai import (
    CHAT_READER,
    COMPLETION_READER,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    TextPart,
)
from gateway.sampling_parser import SamplingParser, sibling_of
from gateway.served_model import ServedModel
from gateway.token_ids import check_token_ids
from protocol import (
    GenerationRequest,
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    SamplingParams,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat may fill what is left of the context

TokenIds = tuple[int, ...]
Prompts = str | tuple[str | int | TokenIds, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP request, understood."""

    request_id: str
    created: int  # seconds of the wall clock
    model: str  # the name that the client used
    requests: tuple[GenerationRequest, ...]  # one for each choice, in order
    stop_strings: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: bool
    tokens_as_ids: bool  # where log-probabilities name tokens


@dataclass(frozen=True)
class Arrival:
    """What is known of a request before its body is read."""

    request_id: str
    time: float  # seconds of the wall clock


class CallParser:
    """Parses calls for one model. Raises `InvalidRequest` and `ModelNotFound`, nothing else."""

    def __init__(self, model: ServedModel, config: GatewayConfig) -> None:
        self._model = model
        self._config = config
        self._sampling = SamplingParser(model, config)

    def completion(self, body: bytes, arrival: Arrival) -> Call:
        fields = COMPLETION_READER.read(body)
        self._check_model(fields.model)
        prompts = self._separate(fields.prompt)
        token_ids = [self._token_ids(field, prompt) for field, prompt in prompts]
        max_tokens = [
            self._max_tokens("max_tokens", fields.max_tokens, len(ids), COMPLETION_MAX_TOKENS)
            for ids in token_ids
        ]
        return self._call(fields, arrival, token_ids, max_tokens)

    def chat(self, body: bytes, arrival: Arrival) -> Call:
        fields = CHAT_READER.read(body)
        self._check_model(fields.model)
        prompt = self._model.chat_template.render([_message(m) for m in fields.messages])
        token_ids = tuple(self._model.tokenizer.encode(prompt, add_special_tokens=False))
        self._check_length("messages", token_ids)
        field, asked = _asked_max_tokens(fields)
        max_tokens = self._max_tokens(field, asked, len(token_ids), self._model.max_model_len)
        return self._call(fields, arrival, [token_ids], [max_tokens])

    def _call(
        self,
        fields: CompletionBody | ChatBody,
        arrival: Arrival,
        prompts: Sequence[TokenIds],
        max_tokens: Sequence[int],
    ) -> Call:
        options = fields.stream_options
        if options is not None and not fields.stream:
            raise InvalidRequest("stream_options", "stream_options: only a stream has them")
        self._check_choices(fields.n, len(prompts))
        samplings = self._sampling.parse(fields, max_tokens)
        return Call(
            request_id=arrival.request_id,
            created=int(arrival.time),
            model=fields.model,
            requests=tuple(
                request
                for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
                for request in _siblings(fields, arrival, index * fields.n, prompt, sampling)
            ),
            stop_strings=self._stop_strings(fields.stop),
            stream=fields.stream,
            include_usage=options is not None and bool(options.include_usage),
            return_token_ids=fields.return_token_ids,
            logprobs=samplings[0].logprobs is not None,
            tokens_as_ids=fields.return_tokens_as_token_ids,
        )

    def _check_choices(self, n: int, num_prompts: int) -> None:
        limit = self._config.max_choices_per_request
        if n * num_prompts > limit:
            prompts = "" if num_prompts == 1 else f" for each of {num_prompts} prompts"
            raise InvalidRequest("n", f"n: {n} choices{prompts} are more than {limit}")

    def _check_model(self, name: str) -> None:
        if name not in self._model.names:
            raise ModelNotFound(name, self._model.names)

    def _separate(self, prompt: Prompts) -> list[tuple[str, str | TokenIds]]:
        """Each prompt, with the name of its field."""
        if isinstance(prompt, str):
            return [("prompt", prompt)]
        token_ids = tuple(item for item in prompt if isinstance(item, int))
        if len(token_ids) == len(prompt):
            return [("prompt", token_ids)]
        if token_ids:
            raise InvalidRequest("prompt", "prompt: token ids and prompts are mixed in one list")
        limit = self._config.max_prompts_per_request
        if len(prompt) > limit:
            raise InvalidRequest("prompt", f"prompt: {len(prompt)} prompts, more than {limit}")
        prompts = [item for item in prompt if not isinstance(item, int)]
        return [(f"prompt[{index}]", item) for index, item in enumerate(prompts)]

    def _token_ids(self, field: str, prompt: str | TokenIds) -> TokenIds:
        if not prompt:  # a text could still get a BOS, but there is nothing to go on from
            raise InvalidRequest(field, f"{field}: the prompt is empty")
        if isinstance(prompt, str):
            prompt = tuple(self._model.tokenizer.encode(prompt, add_special_tokens=True))
        check_token_ids(field, prompt, self._model.tokenizer.vocab_size)
        self._check_length(field, prompt)
        return prompt

    def _check_length(self, field: str, token_ids: TokenIds) -> None:
        limit = self._model.max_model_len
        if not token_ids:
            raise InvalidRequest(field, f"{field}: the prompt is empty")
        if len(token_ids) >= limit:
            what = f"the model's maximum length of {limit}, with at least one token of output,"
            raise PromptTooLong(field, len(token_ids), limit - 1, what)

    def _max_tokens(self, field: str, asked: int | None, num_prompt: int, default: int) -> int:
        limit = self._model.max_model_len
        if asked is None:
            return min(default, limit - num_prompt)
        if num_prompt + asked > limit:
            raise InvalidRequest(
                field,
                f"{field}: the model's maximum length is {limit} tokens, but the prompt has"
                f" {num_prompt} and {asked} are to follow, {num_prompt + asked} together",
            )
        return asked

    def _stop_strings(self, stop: str | tuple[str, ...]) -> tuple[str, ...]:
        stop_strings = (stop,) if isinstance(stop, str) else stop
        limit = self._config.max_stop_strings
        if len(stop_strings) > limit:
            raise InvalidRequest("stop", f"stop: {len(stop_strings)} strings, more than {limit}")
        return stop_strings


def _siblings(
    fields: GenerationBody,
    arrival: Arrival,
    index: int,
    prompt: TokenIds,
    sampling: SamplingParams,
) -> Iterator[GenerationRequest]:
    """The `n` choices of one prompt, the first of which is choice number `index` of the call."""
    first = f"{arrival.request_id}-{index}"
    for number in range(fields.n):
        yield GenerationRequest(
            request_id=f"{arrival.request_id}-{index + number}",
            prompt_token_ids=prompt,
            sampling=sibling_of(sampling, number),
            arrival_time=arrival.time,
            priority=fields.priority,
            cache_salt=fields.cache_salt,
            # What OpenAI recommends, and recommended before, to say which requests go together.
            session_id=fields.prompt_cache_key or fields.user,
            follows=first if number else None,
        )


def _message(message: Message) -> dict[str, str | None]:
    """As chat templates want it. OpenAI calls newer models' system messages `developer`."""
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content),
        "name": message.name,
    }


def _text(content: str | tuple[TextPart, ...]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _asked_max_tokens(fields: ChatBody) -> tuple[str, int | None]:
    """OpenAI's newer name and the older one, which may both be there if they agree."""
    newer, older = fields.max_completion_tokens, fields.max_tokens
    if newer is None:
        return "max_tokens", older
    if older not in (None, newer):
        raise InvalidRequest("max_tokens", "max_tokens and max_completion_tokens disagree")
    return "max_completion_tokens", newer
