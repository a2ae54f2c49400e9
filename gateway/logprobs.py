"""Log-probabilities in OpenAI's two shapes: lists beside each other, and a list of tokens.

The two have the same in them:

    completions   tokens          [" Paris", "."]
                  token_logprobs  [-0.1, -0.4]
                  top_logprobs    [{" Paris": -0.1, " the": -2.9}, …]
                  text_offset     [0, 6]
    chat          content         [{token, logprob, bytes, top_logprobs: [{token, …}, …]}, …]
"""

from __future__ import annotations

import msgspec

from gateway.token_spelling import TokenSpelling
from gateway.transcript import Piece
from protocol import TokenLogprobs

_LEAST = -9999.0  # what OpenAI writes for the logarithm of nothing, for which JSON has no number


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


def completion_logprobs(piece: Piece, spelling: TokenSpelling) -> CompletionLogprobs:
    """Of tokens that are spelled alike, `top_logprobs` has the likeliest, or the chosen one."""
    pairs = list(zip(piece.token_ids, piece.logprobs, strict=True))
    return CompletionLogprobs(
        text_offset=list(piece.offsets),
        token_logprobs=[_finite(entry.logprob) for _, entry in pairs],
        tokens=[spelling.text(token_id) for token_id, _ in pairs],
        top_logprobs=[_top_by_text(token_id, entry, spelling) for token_id, entry in pairs],
    )


def _top_by_text(token_id: int, entry: TokenLogprobs, spelling: TokenSpelling) -> dict[str, float]:
    top: dict[str, float] = {}
    for other, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        top.setdefault(spelling.text(other), _finite(logprob))
    top[spelling.text(token_id)] = _finite(entry.logprob)
    return top


def chat_logprobs(piece: Piece, spelling: TokenSpelling) -> ChatLogprobs:
    pairs = zip(piece.token_ids, piece.logprobs, strict=True)
    return ChatLogprobs(
        content=[_chat_token(token_id, entry, spelling) for token_id, entry in pairs]
    )


def _chat_token(token_id: int, entry: TokenLogprobs, spelling: TokenSpelling) -> ChatTokenLogprob:
    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    return ChatTokenLogprob(
        token=spelling.text(token_id),
        logprob=_finite(entry.logprob),
        bytes=_byte_values(token_id, spelling),
        top_logprobs=[
            TopLogprob(
                token=spelling.text(other),
                logprob=_finite(logprob),
                bytes=_byte_values(other, spelling),
            )
            for other, logprob in top
        ],
    )


def _byte_values(token_id: int, spelling: TokenSpelling) -> list[int] | None:
    spelled = spelling.bytes(token_id)
    return None if spelled is None else list(spelled)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
