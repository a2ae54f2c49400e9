"""The tokenizer of a GGUF file, written as Hugging Face's `tokenizer.json`.

GGUF stores the vocabulary and the merges of byte-level BPE as they are, but of the pre-tokenizer
(how text is cut before merging) only a *name*. Each name means a fixed rule; a wrong rule gives
plausible, wrong tokens, so a name that is not listed here is an error.
Source of the names and rules: `llama-vocab.cpp` of llama.cpp.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from engine.weights.gguf_file import GGUFFile

Json = dict[str, Any]

_BPE = "gpt2"  # what GGUF calls byte-level BPE, whatever its pre-tokenizer
_CONTROL, _USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`
_NO_TOKEN = (-1, 0xFFFFFFFF)  # how GGUF writes "none" as an id

_DIGITS: Json = {"type": "Digits", "individual_digits": True}
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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


_GPT2 = _byte_level(use_regex=True)
_SMOLLM = _sequence(_DIGITS, _GPT2)
_LLAMA3 = _sequence(
    {
        "type": "Split",
        "pattern": {"Regex": _LLAMA3_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    },
    _byte_level(use_regex=False),
)

# "default" is what files say that were made before GGUF had names; they follow GPT-2.
_PRE_TOKENIZERS = {
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "default": _GPT2,
}


class GGUFTokenizer:
    """The tokenizer that a GGUF file describes."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises ModelError: no vocabulary, not byte-level BPE, an unknown pre-tokenizer, or token
        ids outside the vocabulary."""
        self._file = file
        self._kind = _pre_tokenizer_kind(file)
        self._is_llama3 = _PRE_TOKENIZERS[self._kind] is _LLAMA3
        self.tokens = _vocabulary(file)

    @property
    def bos_token_id(self) -> int | None:
        """The token that starts a text, if there is one."""
        return self._special_id("bos")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer: end of text, end of turn, end of message."""
        ids = (self._special_id(name) for name in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, if there is one."""
        return self._file.get("tokenizer.chat_template", str)

    def tokenizer_json(self) -> str:
        """The content of `tokenizer.json`. Raises ModelError if `tokenizers` cannot load it."""
        content = json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": self._added_tokens(),
                "normalizer": None,
                "pre_tokenizer": _PRE_TOKENIZERS[self._kind],
                "post_processor": self._post_processor(),
                "decoder": _byte_level(use_regex=True),
                "model": self._bpe(),
            },
            ensure_ascii=False,
        )
        try:
            Tokenizer.from_str(content)
        except Exception as error:  # tokenizers has no class of its own for this
            raise self._file.broken(f"its vocabulary and merges do not fit: {error}") from error
        return content

    def tokenizer_config(self) -> Json:
        """The content of `tokenizer_config.json`."""
        config: Json = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._adds("bos"),
            "add_eos_token": self._adds("eos"),
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self._special_id(key)
            if token_id is not None:
                config[f"{name}_token"] = self.tokens[token_id]
        return config

    def _bpe(self) -> Json:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
            "ignore_merges": self._is_llama3,
            "vocab": {token: token_id for token_id, token in enumerate(self.tokens)},
            "merges": _merges(self._file),
        }

    def _added_tokens(self) -> list[Json]:
        """The tokens that are found in a text before it is cut: control and user-defined ones."""
        types = self._file.get_list("tokenizer.ggml.token_type", int) or []
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for token_id, (token, kind) in enumerate(zip(self.tokens, types, strict=False))
            if kind in (_CONTROL, _USER_DEFINED)
        ]

    def _post_processor(self) -> Json:
        """Puts the tokens around a text that `add_special_tokens` asks for."""
        before = ["bos"] if self._adds("bos") else []
        after = ["eos"] if self._adds("eos") else []
        special_tokens: Json = {}
        for name in before + after:
            token_id = self._special_id(name)
            assert token_id is not None
            token = self.tokens[token_id]
            special_tokens[token] = {"id": token, "ids": [token_id], "tokens": [token]}

        def template(*sequences: str) -> list[Json]:
            steps: list[Json] = []
            for type_id, sequence in enumerate(sequences):
                steps += [self._special_step(name, type_id) for name in before]
                steps.append({"Sequence": {"id": sequence, "type_id": type_id}})
                steps += [self._special_step(name, type_id) for name in after]
            return steps

        return {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("A", "B"),
            "special_tokens": special_tokens,
        }

    def _special_step(self, name: str, type_id: int) -> Json:
        token_id = self._special_id(name)
        assert token_id is not None
        return {"SpecialToken": {"id": self.tokens[token_id], "type_id": type_id}}

    def _adds(self, name: str) -> bool:
        """Whether encoding adds this token; a file that does not say so follows its kind."""
        said = self._file.get(f"tokenizer.ggml.add_{name}_token", bool)
        by_default = name == "bos" and self._is_llama3
        return (by_default if said is None else said) and self._special_id(name) is not None

    def _special_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self._file.get(key, int)
        if token_id is None or token_id in _NO_TOKEN:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise self._file.broken(f"{key} is {token_id}, of {len(self.tokens)} tokens")
        return token_id


def _pre_tokenizer_kind(file: GGUFFile) -> str:
    model = file.require("tokenizer.ggml.model", str)
    if model != _BPE:
        raise file.broken(
            f"its tokenizer is of the kind {model!r}; only {_BPE!r} (byte-level BPE) can be"
            " converted; use the model's Hugging Face directory"
        )
    kind = file.get("tokenizer.ggml.pre", str) or "default"
    if kind not in _PRE_TOKENIZERS:
        raise file.broken(
            f"unknown pre-tokenizer {kind!r}; known: {', '.join(sorted(_PRE_TOKENIZERS))};"
            " use the model's Hugging Face directory"
        )
    return kind


def _vocabulary(file: GGUFFile) -> list[str]:
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if not tokens:
        raise file.broken("has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise file.broken("its vocabulary has a token twice")
    return tokens


def _merges(file: GGUFFile) -> list[list[str]]:
    merges = file.get_list("tokenizer.ggml.merges", str)
    if merges is None:
        raise file.broken("has no merges (tokenizer.ggml.merges)")
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise file.broken("has a merge that is not two tokens and a space")
    return pairs
