from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as Kind
from tokenizers import Tokenizer

from engine.weights.gguf_file import GGUFFile
from engine.weights.gguf_tokenizer import GGUFTokenizer
from protocol import ModelError
from tests.engine.weights.tiny_models import TinyGGUF, byte_alphabet, vocabulary


def described(tmp_path: Path, **changes: Any) -> GGUFTokenizer:
    """The tokenizer of a tiny file with `tokenizer.ggml.<name>` changed, or left out for None."""
    tiny = TinyGGUF()
    for name, value in changes.items():
        del tiny.metadata[f"tokenizer.ggml.{name}"]
        if value is not None:
            tiny.metadata[f"tokenizer.ggml.{name}"] = value
    return GGUFTokenizer(GGUFFile(tiny.write(tmp_path / "tiny.gguf")))


def built(tmp_path: Path, **changes: Any) -> Tokenizer:
    return Tokenizer.from_str(described(tmp_path, **changes).tokenizer_json())


def cut(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.encode(text).ids]


def test_bytes_and_merges(tmp_path: Path) -> None:
    tokenizer = built(tmp_path)
    assert cut(tokenizer, "the other the") == ["the", " ", "o", "the", "r", " the"]
    assert tokenizer.get_vocab_size() == 266


def test_every_byte_comes_back(tmp_path: Path) -> None:
    tokenizer = built(tmp_path)
    text = "".join(map(chr, range(0x20, 0x500))) + "\n\t\r 😀"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(c) for c in byte_alphabet()] == list(range(3, 259))


def test_special_tokens_are_found_in_text(tmp_path: Path) -> None:
    tokenizer = built(tmp_path)
    ids = tokenizer.encode("<|im_start|>the<|im_end|><think>").ids
    assert ids == [1, vocabulary().index("the"), 2, 265]
    assert tokenizer.decode(ids) == "the<think>"  # user-defined, so it is not special


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("smollm", "12  1", ["1", "2", "  ", "1"]),
        ("gpt-2", "12  1", ["12", " ", " ", "1"]),
        ("default", "12  1", ["12", " ", " ", "1"]),
        ("llama-bpe", "12  1", ["12", " ", " ", "1"]),
        ("gpt-2", "    x", ["  ", " ", " ", "x"]),
        ("llama-bpe", "    x", ["  ", " ", " ", "x"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, kind: str, text: str, expected: list[str]) -> None:
    assert cut(built(tmp_path, pre=(kind, Kind.STRING)), text) == expected


def test_llama3_cuts_numbers_into_threes(tmp_path: Path) -> None:
    pre = built(tmp_path, pre=("llama-bpe", Kind.STRING)).pre_tokenizer
    assert pre is not None
    pieces = [piece for piece, _ in pre.pre_tokenize_str("I'LL pay 12345!\n\n ok")]
    assert pieces == ["I", "'LL", "Ġpay", "Ġ", "123", "45", "!ĊĊ", "Ġok"]


def test_absent_pre_tokenizer_is_gpt2_s(tmp_path: Path) -> None:
    assert cut(built(tmp_path, pre=None), "12") == ["12"]


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos(tmp_path: Path, pre: str, said: bool | None, adds: bool) -> None:
    add_bos = None if said is None else (said, Kind.BOOL)
    tokenizer = built(tmp_path, pre=(pre, Kind.STRING), add_bos_token=add_bos)
    assert tokenizer.encode("the").ids == ([1] if adds else []) + [261 - 1]
    assert tokenizer.encode("the", add_special_tokens=False).ids == [260]


def test_no_token_is_written_as_minus_one(tmp_path: Path) -> None:
    tokenizer = described(tmp_path, bos_token_id=(0xFFFFFFFF, Kind.UINT32))
    assert tokenizer.bos_token_id is None
    assert "bos_token" not in tokenizer.tokenizer_config()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": ("llama", Kind.STRING)}, "kind 'llama'"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": ("qwen9", Kind.STRING)}, "unknown pre-tokenizer 'qwen9'; known: default,"),
        ({"tokens": None}, "has no vocabulary"),
        ({"tokens": (["a", "a"], Kind.ARRAY)}, "a token twice"),
        ({"merges": None}, "has no merges"),
        ({"merges": (["ab"], Kind.ARRAY)}, "not two tokens"),
        ({"merges": (["z q"], Kind.ARRAY)}, "do not fit"),
        ({"bos_token_id": (266, Kind.UINT32)}, "bos_token_id is 266, of 266 tokens"),
        ({"eos_token_id": ("2", Kind.STRING)}, "eos_token_id is str, not int"),
    ],
)
def test_refuses_and_says_why(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        everything(tmp_path, changes)
    assert "tiny.gguf" in str(caught.value)


def everything(tmp_path: Path, changes: dict[str, Any]) -> None:
    tokenizer = described(tmp_path, **changes)
    tokenizer.tokenizer_json()
    tokenizer.tokenizer_config()
