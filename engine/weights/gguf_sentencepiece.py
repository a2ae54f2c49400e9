"""SentencePiece's BPE in a GGUF file (what it calls `llama`): Llama 2 and older Mistrals.

SentencePiece joins whichever two neighbours make the piece with the best *score*; `tokenizer.json`
has an ordered list of merges instead. Every way to cut a piece into two others becomes a merge, and
those of better pieces stand first. Blanks are written as U+2581, a text begins with one, and a
character outside the vocabulary becomes the tokens of its bytes.
Source: `llm_tokenizer_spm` of llama.cpp, `SpmConverter` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from engine.weights.gguf_file import GGUFFile
from engine.weights.gguf_vocabulary import bpe

Json = dict[str, Any]

_T = TypeVar("_T", int, float)

_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # of `tokenizer.ggml.token_type`
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


class SentencePieceVocabulary:
    """See `engine.weights.gguf_vocabulary.GGUFVocabulary`."""

    def __init__(self, file: GGUFFile, tokens: list[str]) -> None:
        """Raises ModelError: no scores or types, or not one for each token."""
        self._file = file
        self.tokens = tokens
        self._scores = _one_each(file, "tokenizer.ggml.scores", float, len(tokens))
        self._types = _one_each(file, "tokenizer.ggml.token_type", int, len(tokens))
        self._begins_with_blank = file.get("tokenizer.ggml.add_space_prefix", bool) is not False

    @property
    def adds_bos(self) -> bool:
        return True

    def special_types(self) -> tuple[int, ...]:
        return (_UNKNOWN, _CONTROL)

    def normalizer(self) -> Json:
        blanks: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
        if not self._begins_with_blank:
            return blanks
        return {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": _BLANK}, blanks],
        }

    def pre_tokenizer(self) -> None:
        return None

    def model(self) -> Json:
        return bpe(
            self.tokens,
            self._merges(),
            unk_token=self._unknown_token(),
            fuse_unk=True,
            byte_fallback=True,
        )

    def decoder(self) -> Json:
        steps: list[Json] = [
            {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self._begins_with_blank:
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {"type": "Sequence", "decoders": steps}

    def _unknown_token(self) -> str | None:
        return self.tokens[self._types.index(_UNKNOWN)] if _UNKNOWN in self._types else None

    def _merges(self) -> list[list[str]]:
        ids = {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self._types, strict=True))
            if kind == _NORMAL
        }
        by_score = sorted(ids, key=lambda token: -self._scores[ids[token]])
        return [[left, right] for token in by_score for left, right in _cuts(token, ids)]


def _cuts(token: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to cut a token into two others, the most frequent ones first."""
    cuts = [(token[:end], token[end:]) for end in range(1, len(token))]
    known = [(left, right) for left, right in cuts if left in ids and right in ids]
    return sorted(known, key=lambda cut: (ids[cut[0]], ids[cut[1]]))


def _one_each(file: GGUFFile, key: str, kind: type[_T], num_tokens: int) -> list[_T]:
    values = file.get_list(key, kind) or []
    if len(values) != num_tokens:
        raise file.broken(f"{key} has {len(values)} entries for {num_tokens} tokens")
    return values
