"""How single tokens are written, where an answer speaks of tokens rather than of text."""

from __future__ import annotations

from gateway.detokenizer import text_assembler
from gateway.tokenizer import Tokenizer


class TokenSpelling:
    """As text and as bytes. A token may be a part of a character: then only its bytes tell all."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        """`as_ids`: write `token_id:5` instead of a text, which several tokens may share."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._assembler = text_assembler(tokenizer)

    def text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return (self.bytes(token_id) or b"").decode(errors="replace")

    def bytes(self, token_id: int) -> bytes | None:
        """None: the model has this token, but the vocabulary no spelling of it."""
        piece = self._tokenizer.piece(token_id)
        return None if piece is None else self._assembler.spell(piece)
