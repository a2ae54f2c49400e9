"""Byte-level BPE in a GGUF file (what it calls `gpt2`), whatever its pre-tokenizer.

GGUF stores the vocabulary and the merges as they are, but of the pre-tokenizer (how text is cut
before merging) only a *name*. Each name means a fixed rule; a wrong rule gives plausible, wrong
tokens, so a name that is not listed here is an error.
Source of the names and rules: `llama-vocab.cpp` of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.weights.gguf_file import GGUFFile
from engine.weights.gguf_vocabulary import bpe

Json = dict[str, Any]

_CONTROL = 3

_DIGITS: Json = {"type": "Digits", "individual_digits": True}
_NFC: Json = {"type": "NFC"}

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> Json:
    """To bytes; with `use_regex` it also cuts as GPT-2 does."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> Json:
    cut = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return _sequence(cut, _byte_level(use_regex=False))


@dataclass(frozen=True)
class _Rule:
    """What a name means, besides how text is cut."""

    pre_tokenizer: Json
    normalizer: Json | None = None
    takes_words_whole: bool = False  # a word in the vocabulary, whatever the merges say
    adds_bos: bool = False


_GPT2 = _Rule(_byte_level(use_regex=True))
_LLAMA3 = _Rule(_split(_LLAMA3_PATTERN), takes_words_whole=True, adds_bos=True)

# "default" is what files say that were made before GGUF had names; they follow GPT-2.
_RULES = {
    "smollm": _Rule(_sequence(_DIGITS, _byte_level(use_regex=True))),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _Rule(_split(_LLAMA3_PATTERN), takes_words_whole=True),  # SmolLM3 has it
    "qwen2": _Rule(_split(_QWEN2_PATTERN), normalizer=_NFC),
    "tekken": _Rule(_split(_TEKKEN_PATTERN), takes_words_whole=True, adds_bos=True),  # Mistral
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "default": _GPT2,
}


class ByteLevelVocabulary:
    """See `engine.weights.gguf_vocabulary.GGUFVocabulary`."""

    def __init__(self, file: GGUFFile, tokens: list[str]) -> None:
        """Raises ModelError: an unknown pre-tokenizer."""
        self._file = file
        self._rule = _rule(file)
        self.tokens = tokens

    @property
    def adds_bos(self) -> bool:
        return self._rule.adds_bos

    def special_types(self) -> tuple[int, ...]:
        return (_CONTROL,)

    def normalizer(self) -> Json | None:
        return self._rule.normalizer

    def pre_tokenizer(self) -> Json:
        return self._rule.pre_tokenizer

    def model(self) -> Json:
        merges = _merges(self._file)
        return bpe(self.tokens, merges, ignore_merges=self._rule.takes_words_whole)

    def decoder(self) -> Json:
        return _byte_level(use_regex=True)


def _rule(file: GGUFFile) -> _Rule:
    kind = file.get("tokenizer.ggml.pre", str) or "default"
    if kind not in _RULES:
        raise file.broken(
            f"unknown pre-tokenizer {kind!r}; known: {', '.join(sorted(_RULES))};"
            " use the model's Hugging Face directory"
        )
    return _RULES[kind]


def _merges(file: GGUFFile) -> list[list[str]]:
    merges = file.get_list("tokenizer.ggml.merges", str)
    if merges is None:
        raise file.broken("has no merges (tokenizer.ggml.merges)")
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise file.broken("has a merge that is not two tokens and a space")
    return pairs
