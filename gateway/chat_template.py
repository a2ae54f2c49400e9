"""Chat messages to the prompt that the model was trained on, by the model's own Jinja template.

Follows what Hugging Face documents for chat templates: which variables, functions and filters a
template may use, and how white space is trimmed. The template comes with the model and the messages
from a client; neither is trusted with more than strings, hence the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.weights import ModelFiles
from protocol import InvalidRequest, ModelError

Message = Mapping[str, Any]

# Not only Jinja's own: a template adds, indexes and prints whatever the client sent.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """The chat template of one model, compiled once."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        *,
        origin: str = "chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`source` is None for a model without one; `now` answers a template's `strftime_now`.

        Raises ModelError for a template that does not compile; `origin` names it there.
        """
        self._special_tokens = dict(special_tokens)
        self._template = None if source is None else _compile(source, origin, now)

    @classmethod
    def load(cls, files: ModelFiles) -> ChatTemplate:
        """The template of a resolved model: chat_template.jinja, or else tokenizer_config.json's.

        Raises ModelError: unreadable, or it does not compile.
        """
        path = files.directory / "tokenizer_config.json"
        config = _read_config(path)
        tokens = {name: getattr(config, name) for name in _SPECIAL_TOKENS}
        special_tokens = {name: _content(token) for name, token in tokens.items() if token}
        jinja_path = files.directory / "chat_template.jinja"
        if jinja_path.is_file():
            return cls(_read_text(jinja_path), special_tokens, origin=str(jinja_path))
        return cls(_default_template(config), special_tokens, origin=str(path))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Message] | None = None,
    ) -> str:
        """The prompt; encode it with `add_special_tokens=False`, since it has its own.

        A key whose value is None counts as absent: clients send `"tool_calls": null`, and templates
        ask only whether the key is there. Raises InvalidRequest: the model has no template, or the
        template refuses these messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "messages", "this model has no chat template; send a prompt to /v1/completions"
            )
        present = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            return self._template.render(
                messages=present,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                "messages", f"the model's chat template refuses these messages: {error}"
            ) from error


class _ConfigJson(msgspec.Struct):
    """The keys of tokenizer_config.json that matter; a token is a string or `{"content": ...}`."""

    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model says, for training; here it only has to parse."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, origin: str, now: Callable[[], datetime]) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"{origin}: the chat template does not compile: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_config(path: Path) -> _ConfigJson:
    if not path.is_file():
        return _ConfigJson()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_ConfigJson)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}", path=str(path)) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 text: {error}", path=str(path)) from error


def _default_template(config: _ConfigJson) -> str | None:
    """Some models have several, by name; `default` is the one for chats without further wishes."""
    if not isinstance(config.chat_template, list):
        return config.chat_template
    named = {entry.get("name"): entry.get("template") for entry in config.chat_template}
    return named.get("default")


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token.get("content", ""))
