"""The seam between a GGUF file's tokenizer and the kinds of vocabulary that it may have."""

from __future__ import annotations

from typing import Any, Protocol

Json = dict[str, Any]


class GGUFVocabulary(Protocol):
    """Turns the tokens of one GGUF file into the parts of a `tokenizer.json` that differ by kind.

    Each method raises ModelError for metadata that is missing or does not fit.
    """

    @property
    def tokens(self) -> list[str]:
        """The vocabulary, by id."""

    @property
    def adds_bos(self) -> bool:
        """Whether a text begins with the BOS token in files that do not say so."""

    def special_types(self) -> tuple[int, ...]:
        """The token types that `decode` leaves out when it skips special tokens."""

    def normalizer(self) -> Json | None: ...

    def pre_tokenizer(self) -> Json | None: ...

    def model(self) -> Json: ...

    def decoder(self) -> Json: ...


def bpe(tokens: list[str], merges: list[list[str]], **changes: object) -> Json:
    """A BPE model; merges come first that stand first."""
    model: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return model | changes | {"vocab": vocab, "merges": merges}
