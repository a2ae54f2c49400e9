"""Text of the real model, against what transformers made of it (tests/data/record_tokenizer.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.weights import ModelFiles, ModelStore
from gateway.chat_template import ChatTemplate
from gateway.detokenizer import IncrementalDetokenizer
from gateway.tokenizer import Tokenizer
from protocol import InvalidRequest

pytestmark = pytest.mark.real_model

DATA = Path(__file__).parents[1] / "data" / "smollm2_tokenizer.json"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(DATA.read_text())


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ModelStore(Path.home() / ".cache" / "kvrelay").resolve("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return Tokenizer.load(files)


@pytest.mark.parametrize(("key", "special"), [("encode", False), ("encode_special", True)])
def test_same_ids(recorded: dict[str, Any], tokenizer: Tokenizer, key: str, special: bool) -> None:
    assert len(recorded[key]) > 50
    for case in recorded[key]:
        assert tokenizer.encode(case["text"], special) == case["ids"], case["text"]


def test_same_text(recorded: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == recorded["vocab_size"]
    for case in recorded["decode"]:
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
        assert tokenizer.decode(case["ids"]) == case["without_special"]


def test_same_text_piece_by_piece(recorded: dict[str, Any], tokenizer: Tokenizer) -> None:
    for case in recorded["decode"]:
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = "".join(detokenizer.push([token_id]) for token_id in case["ids"])
        assert text + detokenizer.flush() == case["without_special"]


@pytest.mark.parametrize(("key", "prompt"), [("with_prompt", True), ("without_prompt", False)])
def test_same_chats(recorded: dict[str, Any], files: ModelFiles, key: str, prompt: bool) -> None:
    template = ChatTemplate.load(files)
    for case in recorded["chats"]:
        assert template.render(case["messages"], add_generation_prompt=prompt) == case[key]


@pytest.mark.parametrize(("key", "prompt"), [("with_prompt", True), ("without_prompt", False)])
def test_same_rendering_of_other_templates(
    recorded: dict[str, Any], files: ModelFiles, key: str, prompt: bool
) -> None:
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    for case in recorded["templates"]:
        template = ChatTemplate(case["template"], tokens)
        if case[key] is None:
            with pytest.raises(InvalidRequest):
                template.render(case["messages"], add_generation_prompt=prompt)
        else:
            assert template.render(case["messages"], add_generation_prompt=prompt) == case[key]
