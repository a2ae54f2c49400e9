from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as Kind
from tokenizers import Tokenizer

from engine.weights.gguf_file import GGUFFile
from engine.weights.gguf_tokenizer import GGUFTokenizer
from protocol import ModelError
from tests.engine.weights.tiny_models import MERGES, TinyGGUF, byte_alphabet, vocabulary


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


def test_qwen2_cuts_and_normalises_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    vocab = {token: index for index, token in enumerate(vocabulary())}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in MERGES])
    ours = built(tmp_path, pre=("qwen2", Kind.STRING))
    for text in (
        "I'LL pay 12345!\n\n ok",
        "the other  the\t12",
        "cafe\u0301 \u1e9b\u0323 ñ",
        "ｘ ",
    ):
        assert ours.encode(text).ids == theirs.encode(text)
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text))


def test_tekken_cuts_where_a_word_s_case_changes(tmp_path: Path) -> None:
    """Mistral's rule: capitals and then small letters are one word, and digits are alone."""
    pre = built(tmp_path, pre=("tekken", Kind.STRING)).pre_tokenizer
    assert pre is not None
    pieces = [piece for piece, _ in pre.pre_tokenize_str("HTTPServer camelCase 123 a/b//\n")]
    assert pieces == [
        "HTTPServer", "Ġcamel", "Case", "Ġ", "1", "2", "3", "Ġa", "/b", "//Ċ",
    ]  # fmt: skip


def test_smollm3_cuts_like_llama3_and_adds_nothing(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, pre=("smaug-bpe", Kind.STRING), add_bos_token=None)
    llama3 = built(tmp_path, pre=("llama-bpe", Kind.STRING), add_bos_token=None)
    text = "I'LL pay 12345!\n\n the"
    assert [1, *tokenizer.encode(text).ids] == llama3.encode(text).ids


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
        ({"model": ("bert", Kind.STRING)}, "kind 'bert'.*known: gpt2, llama"),
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
