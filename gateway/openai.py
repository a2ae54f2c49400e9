"""The bodies that the OpenAI API defines, as far as this gateway takes them.

A body is read field by field, each by its own type, so that an error always names its field.
Every field is one of these:

* taken: it is in the body's class, with its type and limits;
* ignored: it asks for nothing that changes an answer; it is checked and dropped;
* refused, unless its value asks for nothing: what OpenAI or vLLM know and this gateway does not do;
* unknown: an error, because a mistyped `max_tokns` must not be dropped silently.

A field that is null is a field that was not given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from protocol import InvalidRequest

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Nothing = Annotated[tuple[Any, ...], msgspec.Meta(max_length=0)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; there is none


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat completions have in common."""

    model: str
    max_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = 0  # -1 and 0: all
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    logit_bias: dict[str, float] = {}
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    seed: _Int64 | None = None
    stop: _Text | tuple[_Text, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # where answers spell tokens
    priority: _Int64 = 0
    cache_salt: _Text | None = None
    user: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: str | tuple[str | int | tuple[int, ...], ...]
    logprobs: bool | _NumLogprobs | None = None  # false: none, as in a chat


class TextPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat. What only an assistant's own message has may be there, but empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...]
    name: str | None = None
    refusal: Literal[None] = None
    audio: Literal[None] = None
    function_call: Literal[None] = None
    tool_calls: _Nothing | None = None
    annotations: _Nothing | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: Annotated[tuple[Message, ...], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: _NumLogprobs = 0


# Ignored fields and their types.
_IGNORED: Mapping[str, Any] = {
    "metadata": dict[str, str],
    "parallel_tool_calls": bool,
    "prompt_cache_retention": str,
    "safety_identifier": str,
}

# Refused fields and the values that ask for nothing.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_REFUSED_COMPLETION = {**_REFUSED, "suffix": ("",)}
_REFUSED_CHAT = {
    **_REFUSED,
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

Body = TypeVar("Body", bound=GenerationBody)


class BodyReader(Generic[Body]):
    """Reads one kind of body."""

    def __init__(self, body: type[Body], refused: Mapping[str, tuple[object, ...]]) -> None:
        self._body = body
        self._refused = refused
        self._ignored = {name: msgspec.json.Decoder(kind) for name, kind in _IGNORED.items()}
        fields = msgspec.structs.fields(body)
        self._taken = {field.name: msgspec.json.Decoder(field.type) for field in fields}
        self._required = [field.name for field in fields if field.required]

    def read(self, body: bytes) -> Body:
        """Raises `InvalidRequest`, which names the field if the error has one."""
        given = dict(self._given(_fields_of(body)))
        for name in self._required:
            if name not in given:
                raise InvalidRequest(name, f"{name}: this field is required")
        return self._body(**given)

    def _given(self, fields: Mapping[str, msgspec.Raw]) -> Iterator[tuple[str, Any]]:
        """The taken fields that are there, by name."""
        for name, raw in fields.items():
            if decoder := self._taken.get(name) or self._ignored.get(name):
                value = None if raw == _NULL else _value(name, raw, decoder)
                if value is not None and name in self._taken:
                    yield name, value
            elif name in self._refused:
                _refuse(name, _value(name, raw, _ANYTHING), self._refused[name])
            else:
                raise InvalidRequest(name, f"{name}: there is no such field")


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANYTHING = msgspec.json.Decoder()
_NULL = msgspec.Raw(b"null")

COMPLETION_READER = BodyReader(CompletionBody, _REFUSED_COMPLETION)
CHAT_READER = BodyReader(ChatBody, _REFUSED_CHAT)


def _fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _FIELDS.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest("", "the body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        for name in _not_finite(body):
            raise InvalidRequest(name, f"{name}: NaN and infinity are no JSON") from error
        raise InvalidRequest("", f"the body is not JSON that can be read: {error}") from error


def _not_finite(body: bytes) -> Iterator[str]:
    """Fields that hold what Python writes for floats that JSON does not have."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            yield name


def _value(name: str, raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        # "Expected `int`, got `str` - at `$[2][1]`"; no place means the field itself.
        problem, _, place = str(error).partition(" - at `$")
        field = name + place.rstrip("`")
        raise InvalidRequest(field, f"{field}: {problem}") from error


def _refuse(name: str, value: object, harmless: tuple[object, ...]) -> None:
    if value is None or any(_same(value, other) for other in harmless):
        return
    unless = " or ".join(msgspec.json.encode(other).decode() for other in harmless)
    detail = f" (only {unless})" if unless else ""
    raise InvalidRequest(name, f"{name}: this is not supported{detail}")


def _same(value: object, other: object) -> bool:
    """Equal in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
