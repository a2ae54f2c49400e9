"""What the gateway knows of the model that it serves."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.chat_template import ChatTemplate
from gateway.detokenizer import IncrementalDetokenizer
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model, under one name or several; `name` is the one that `/v1/models` calls it by."""

    name: str
    max_model_len: int  # tokens of a prompt and its output together
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    aliases: tuple[str, ...] = ()
    created: int = 0  # seconds of the wall clock

    def __post_init__(self) -> None:
        """Raises ModelError: text cannot be streamed. Better now than at the first request."""
        IncrementalDetokenizer(self.tokenizer)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)
