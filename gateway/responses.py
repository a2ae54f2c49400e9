"""Answers in OpenAI's shapes, and where vLLM's go beyond them, in those.

Two formats with the same three verbs: `chunk` for a piece of a stream, `usage` for its last event
before the end, `whole` for an answer that does not stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from gateway.call import Call
from gateway.generation import Usage
from gateway.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
)
from gateway.token_spelling import TokenSpelling
from gateway.tokenizer import Tokenizer
from gateway.transcript import Piece
from protocol import FinishReason

_Ids = tuple[int, ...]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_token_ids: _Ids | UnsetType = UNSET
    token_ids: _Ids | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or a chunk of one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: _Ids | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: _Ids | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice | ChunkChoice]
    usage: Usage | UnsetType | None
    prompt_token_ids: _Ids | UnsetType = UNSET


class Format(Protocol):
    """How the answer to one call is written. Methods return JSON."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None: ...

    def chunk(self, piece: Piece) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes: ...


class CompletionFormat:
    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._spelling = TokenSpelling(tokenizer, as_ids=call.tokens_as_ids)
        self._begun: set[int] = set()  # the choices that have had a chunk
        self._no_usage = None if call.include_usage else UNSET

    def chunk(self, piece: Piece) -> bytes:
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        return self._write([self._choice(piece, with_prompt=first)], self._no_usage)

    def usage(self, usage: Usage) -> bytes:
        return self._write([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        return self._write([self._choice(piece, with_prompt=True) for piece in choices], usage)

    def _choice(self, piece: Piece, *, with_prompt: bool) -> CompletionChoice:
        with_ids = self._call.return_token_ids
        prompt = self._call.requests[piece.index].prompt_token_ids
        return CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=completion_logprobs(piece, self._spelling) if self._call.logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            prompt_token_ids=prompt if with_ids and with_prompt else UNSET,
            token_ids=piece.token_ids if with_ids else UNSET,
        )

    def _write(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        call = self._call
        return msgspec.json.encode(
            Completion(
                id=call.request_id,
                created=call.created,
                model=call.model,
                choices=choices,
                usage=usage,
            )
        )


class ChatFormat:
    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._spelling = TokenSpelling(tokenizer, as_ids=call.tokens_as_ids)
        self._begun: set[int] = set()  # the choices that have had a chunk
        self._no_usage = None if call.include_usage else UNSET

    def chunk(self, piece: Piece) -> bytes:
        first = not self._begun
        role = UNSET if piece.index in self._begun else "assistant"
        self._begun.add(piece.index)
        choice = ChunkChoice(
            index=piece.index,
            delta=Delta(role=role, content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self._call.return_token_ids else UNSET,
        )
        return self._write("chat.completion.chunk", [choice], self._no_usage, with_prompt=first)

    def usage(self, usage: Usage) -> bytes:
        return self._write("chat.completion.chunk", [], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        written = [
            ChatChoice(
                index=piece.index,
                message=Delta(role="assistant", content=piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=piece.token_ids if self._call.return_token_ids else UNSET,
            )
            for piece in choices
        ]
        return self._write("chat.completion", written, usage, with_prompt=True)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(piece, self._spelling) if self._call.logprobs else None

    def _write(
        self,
        kind: str,
        choices: Sequence[ChatChoice | ChunkChoice],
        usage: Usage | UnsetType | None,
        *,
        with_prompt: bool = False,
    ) -> bytes:
        call = self._call
        prompt = call.requests[0].prompt_token_ids
        return msgspec.json.encode(
            ChatCompletion(
                id=call.request_id,
                object=kind,
                created=call.created,
                model=call.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=prompt if call.return_token_ids and with_prompt else UNSET,
            )
        )
