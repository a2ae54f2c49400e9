"""The tokenizer of a GGUF file, written as Hugging Face's `tokenizer.json`.

Knows what all kinds of vocabulary have in common: special tokens, what is put around a text, and
which of them ends an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from engine.weights.gguf_byte_level import ByteLevelVocabulary
from engine.weights.gguf_file import GGUFFile
from engine.weights.gguf_sentencepiece import SentencePieceVocabulary
from engine.weights.gguf_vocabulary import GGUFVocabulary

Json = dict[str, Any]

_USER_DEFINED = 4  # of `tokenizer.ggml.token_type`
_NO_TOKEN = (-1, 0xFFFFFFFF)  # how GGUF writes "none" as an id

_VOCABULARIES: Mapping[str, Callable[[GGUFFile, list[str]], GGUFVocabulary]] = {
    "gpt2": ByteLevelVocabulary,
    "llama": SentencePieceVocabulary,
}


class GGUFTokenizer:
    """The tokenizer that a GGUF file describes."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises ModelError: no vocabulary, one of an unknown kind, or an unknown pre-tokenizer."""
        self._file = file
        self._vocabulary = _vocabulary(file)
        self.tokens = self._vocabulary.tokens

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
                "normalizer": self._vocabulary.normalizer(),
                "pre_tokenizer": self._vocabulary.pre_tokenizer(),
                "post_processor": self._post_processor(),
                "decoder": self._vocabulary.decoder(),
                "model": self._vocabulary.model(),
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

    def _added_tokens(self) -> list[Json]:
        """The tokens that are found in a text before it is cut: control and user-defined ones."""
        types = self._file.get_list("tokenizer.ggml.token_type", int) or []
        special = self._vocabulary.special_types()
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind in special,
            }
            for token_id, (token, kind) in enumerate(zip(self.tokens, types, strict=False))
            if kind in (*special, _USER_DEFINED)
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
        by_default = name == "bos" and self._vocabulary.adds_bos
        return (by_default if said is None else said) and self._special_id(name) is not None

    def _special_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self._file.get(key, int)
        if token_id is None or token_id in _NO_TOKEN:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise self._file.broken(f"{key} is {token_id}, of {len(self.tokens)} tokens")
        return token_id


def _vocabulary(file: GGUFFile) -> GGUFVocabulary:
    model = file.require("tokenizer.ggml.model", str)
    if model not in _VOCABULARIES:
        raise file.broken(
            f"its tokenizer is of the kind {model!r}, which cannot be converted; known:"
            f" {', '.join(_VOCABULARIES)}; use the model's Hugging Face directory"
        )
    return _VOCABULARIES[model](file, _tokens(file))


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if not tokens:
        raise file.broken("has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise file.broken("its vocabulary has a token twice")
    return tokens
