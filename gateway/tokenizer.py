"""Text to token ids and back, with `tokenizers` alone: transformers takes seconds to import."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from engine.weights import ModelFiles
from protocol import InvalidRequest, ModelError


class Tokenizer:
    """The tokenizer of one model. Immutable, and safe to use from several threads."""

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Load the `tokenizer.json` at `path`. Raises ModelError: missing or broken."""
        self.path = path
        self.eos_token_ids = eos_token_ids
        self._backend = _load(path)
        self._special = frozenset(
            token.content
            for token in self._backend.get_added_tokens_decoder().values()
            if token.special
        )

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """The tokenizer of a resolved model. Raises ModelError as the constructor does."""
        return cls(files.directory / "tokenizer.json", files.eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, the added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. A special token that is spelled out in it becomes its id.

        `add_special_tokens` puts the model's own around it (a BOS, mostly); a rendered chat already
        has them. Raises InvalidRequest: half a surrogate pair, which no UTF-8 text holds.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # what tokenizers says of a str that has no UTF-8 form
            raise InvalidRequest("prompt", "the text holds a lone surrogate") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens; ids outside the vocabulary stand for nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str | None:
        """How the vocabulary spells a token (`Ġthe`, `<0x0A>`), None outside the vocabulary."""
        return self._backend.id_to_token(token_id)

    def is_special(self, piece: str) -> bool:
        """Whether `decode` leaves out this piece when it skips special tokens."""
        return piece in self._special

    def decoder(self) -> dict[str, Any] | None:
        """The `decoder` of tokenizer.json: how pieces become text. None: joined by blanks."""
        decoder = self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())


def _load(path: Path) -> Backend:
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file", path=str(path))
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers has no class of its own for this
        raise ModelError(f"{path}: cannot be loaded: {error}", path=str(path)) from error
