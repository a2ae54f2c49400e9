"""A tokenizer small enough to know by heart: one token a byte, a few words, three special tokens.

Ids 0 to 255 are the bytes, so that `ids(text)` is what a text is made of, and characters of several
bytes are split between tokens.
"""

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from gateway import Tokenizer

START, END, BOS = 256, 257, 258
VOCAB_SIZE = 259


def byte_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|bos|>"]
    backend.add_special_tokens([AddedToken(content, special=True) for content in special])
    backend.save(str(path))
    return Tokenizer(path, eos_token_ids=(END,))


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def _byte_characters() -> list[str]:
    """What GPT-2 writes for byte 0, 1, 2, ...: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
