"""From the tokens of one choice to what its client may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.detokenizer import IncrementalDetokenizer
from gateway.stop_strings import StopStringScanner
from protocol import FinishReason, TokenChunk, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one choice: text that will not be taken back, and the tokens it came with.

    The text of a token may come in a later piece than the token: half a character, or what may be
    the beginning of a stop string, is held back.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that the client asked for
    logprobs: tuple[TokenLogprobs, ...] = ()  # of its tokens, if asked for
    offsets: tuple[int, ...] = ()  # where in the choice's text its tokens begin; with `logprobs`

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """All pieces of a choice, in order, as one."""
        return cls(
            index=pieces[-1].index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            finish_reason=pieces[-1].finish_reason,
            stop_reason=pieces[-1].stop_reason,
            logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
            offsets=tuple(offset for piece in pieces for offset in piece.offsets),
        )


class Transcript:
    """What one choice has said so far. Pure: tokens in, pieces out.

    A token that ends the choice (end of text, or one of the stop tokens) counts as a token but is
    not text. A stop string is neither, except that the token that completes it counts; one that
    the first `min_tokens` tokens complete is text.
    """

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer,
        stop_strings: Sequence[str],
        *,
        min_tokens: int = 0,
        with_offsets: bool = False,
    ) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._scanner = StopStringScanner(stop_strings)
        self._by_token = bool(stop_strings) or with_offsets
        self._min_tokens = min_tokens
        self._with_offsets = with_offsets
        self._num_tokens = 0  # only counted token by token
        self._num_chars = 0

    def add(self, chunk: TokenChunk) -> Piece:
        """The piece that `chunk` makes. After one with a finish reason, add no more."""
        offsets: list[int] = []
        text, num_tokens = self._text_of(chunk, offsets)
        if chunk.finish_reason is not None and self._scanner.stopped is None:
            text += self._scanner.feed(self._detokenizer.flush())
            if self._scanner.stopped is None:
                text += self._scanner.flush()
        stopped = self._scanner.stopped
        return Piece(
            index=self._index,
            text=text,
            token_ids=chunk.token_ids[:num_tokens],
            finish_reason=chunk.finish_reason if stopped is None else FinishReason.STOP,
            stop_reason=chunk.stop_token_id if stopped is None else stopped,
            logprobs=chunk.logprobs[:num_tokens],
            offsets=tuple(offsets[:num_tokens]) if self._with_offsets else (),
        )

    def _text_of(self, chunk: TokenChunk, offsets: list[int]) -> tuple[str, int]:
        """The text to show, and how many tokens of the chunk count; `offsets` get theirs."""
        token_ids = chunk.token_ids
        spoken = token_ids[:-1] if chunk.finish_reason is FinishReason.STOP else token_ids
        if not self._by_token:
            return self._detokenizer.push(spoken), len(token_ids)
        text = ""
        for position, token_id in enumerate(spoken):
            offsets.append(self._num_chars)
            pushed = self._detokenizer.push((token_id,))
            self._num_tokens += 1
            self._num_chars += len(pushed)
            text += self._scanner.feed(pushed, may_stop=self._num_tokens > self._min_tokens)
            if self._scanner.stopped is not None:
                return text, position + 1
        offsets += [self._num_chars] * (len(token_ids) - len(spoken))
        return text, len(token_ids)
