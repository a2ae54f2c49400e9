"""Token ids, as they come, to text that never has to be taken back.

A token is not a piece of text: its bytes may end in the middle of a character, so text is held
back until its bytes are complete. What was emitted, and the flush at the end, always give the text
that `Tokenizer.decode` gives for all the ids; an id costs constant time, however long the answer.

    ids       " caf"   0xC3   0xA9   " ok"
    emitted   " caf"   ""     "é"    " ok"
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any, Protocol

from gateway.tokenizer import Tokenizer
from protocol import ModelError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text of one answer."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Raises ModelError for a decoder of tokenizer.json that is neither of the two kinds."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._text = text_assembler(tokenizer)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now and was not before; often one word, sometimes nothing."""
        return "".join(self._text.push(piece) for piece in self._pieces(token_ids))

    def flush(self) -> str:
        """The rest, at the end of the answer: a character that never became whole is `\ufffd`."""
        return self._text.flush()

    def _pieces(self, token_ids: Iterable[int]) -> Iterable[str]:
        for token_id in token_ids:
            piece = self._tokenizer.piece(token_id)
            if piece is None or (self._skip_special_tokens and self._tokenizer.is_special(piece)):
                continue
            yield piece


class TextAssembler(Protocol):
    """Joins the pieces of a vocabulary to text, as one kind of decoder does."""

    def push(self, piece: str) -> str: ...

    def flush(self) -> str: ...

    def spell(self, piece: str) -> bytes:
        """What a piece alone adds to a text, in UTF-8; maybe only a part of a character."""


class _ByteLevel:
    """GPT-2's kind: every character of a piece stands for one byte."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> str:
        return self._utf8.decode(_piece_bytes(piece))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def spell(self, piece: str) -> bytes:
        return _piece_bytes(piece)


class _ByteFallback:
    """SentencePiece's kind: pieces are text, but for bytes of characters outside the vocabulary.

    A run of such bytes is text if the *whole* run is UTF-8 and one `\ufffd` a byte if not, so
    nothing of it is certain before it ends.
    """

    def __init__(self, replacements: list[tuple[str, str]], strip: str, max_stripped: int) -> None:
        self._replacements = replacements
        self._strip = strip
        self._num_to_strip = max_stripped  # characters at the start that may still be dropped
        self._run = bytearray()

    def push(self, piece: str) -> str:
        piece = self._replaced(piece)
        if byte := _BYTE_PIECE.fullmatch(piece):
            self._run.append(int(byte[1], 16))
            return ""
        return self._end_run() + self._stripped(piece)

    def flush(self) -> str:
        return self._end_run()

    def spell(self, piece: str) -> bytes:
        piece = self._replaced(piece)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.encode()

    def _replaced(self, piece: str) -> str:
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            text = run.decode()
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(run)
        return self._stripped(text)

    def _stripped(self, text: str) -> str:
        while text and self._num_to_strip:
            if not text.startswith(self._strip):
                self._num_to_strip = 0
                break
            text = text.removeprefix(self._strip)
            self._num_to_strip -= 1
        return text


def text_assembler(tokenizer: Tokenizer) -> TextAssembler:
    """What the tokenizer's decoder asks for. Raises ModelError: it is of neither kind."""
    decoder = tokenizer.decoder() or {"type": "none"}
    if decoder["type"] == "ByteLevel":
        return _ByteLevel()
    if decoder["type"] == "Sequence" and (steps := _byte_fallback_steps(decoder["decoders"])):
        return steps
    raise ModelError(
        f"{tokenizer.path}: its decoder ({_describe(decoder)}) is not supported, only ByteLevel,"
        " and Replace, ByteFallback, Fuse and Strip in this order",
        path=str(tokenizer.path),
    )


def _byte_fallback_steps(steps: list[dict[str, Any]]) -> _ByteFallback | None:
    """What `Replace* ByteFallback Fuse Strip?` asks for, None for any other sequence."""
    replaces = [step for step in steps if step["type"] == "Replace"]
    rest = steps[len(replaces) :]
    strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
    if rest and rest[-1]["type"] == "Strip":
        strip = rest.pop()
    in_order = [step["type"] for step in rest] == ["ByteFallback", "Fuse"]
    plain = all("String" in step["pattern"] for step in replaces) and strip["stop"] == 0
    if not (in_order and plain):
        return None
    pairs = [(step["pattern"]["String"], step["content"]) for step in replaces]
    return _ByteFallback(pairs, strip["content"], strip["start"])


def _describe(decoder: dict[str, Any]) -> str:
    steps = decoder.get("decoders", [])
    return " ".join([decoder["type"], *(step["type"] for step in steps)])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's way to write bytes as printable characters: those that are printable in Latin-1 stand
    for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    """An added token may use other characters; it then stands for its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()
