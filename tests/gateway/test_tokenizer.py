from __future__ import annotations

from pathlib import Path

import pytest

from engine.weights import ModelFiles
from gateway.tokenizer import Tokenizer
from protocol import InvalidRequest, ModelError
from tests.engine.weights.tiny_models import (
    SPECIAL_TOKENS,
    tokenizer_json,
    vocabulary,
    write_hf_directory,
    write_json,
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(ModelFiles.read("m", write_hf_directory(tmp_path)))


def test_what_it_knows_of_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(vocabulary())
    assert tokenizer.eos_token_ids == (2,)


def test_added_tokens_count_as_vocabulary(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 266, "content": "<new>"})
    write_json(tmp_path / "tokenizer.json", content)
    assert Tokenizer(tmp_path / "tokenizer.json").vocab_size == 267


@pytest.mark.parametrize("text", ["", " ", "the other", "größe\n\n 12", "😀👍🏽", "\0\x7f"])
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>the<|im_end|>", add_special_tokens=False)
    assert ids == [1, vocabulary().index("the"), 2]
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"
    assert all(tokenizer.is_special(token) for token in SPECIAL_TOKENS)
    assert not tokenizer.is_special("the")


def test_add_special_tokens(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    write_json(tmp_path / "tokenizer.json", content)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    the = vocabulary().index("the")
    assert tokenizer.encode("the", add_special_tokens=True) == [1, the]
    assert tokenizer.encode("the", add_special_tokens=False) == [the]


def test_ids_outside_the_vocabulary_are_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([10_000]) == ""
    assert tokenizer.piece(10_000) is None


def test_half_a_surrogate_pair_is_the_client_s_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        tokenizer.encode("a\ud83d", add_special_tokens=False)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_missing_or_broken_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(path)
