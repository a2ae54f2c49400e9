from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import IncrementalDetokenizer
from gateway.tokenizer import Tokenizer
from protocol import ModelError
from tests.engine.weights.tiny_models import tokenizer_json, write_json

BYTE_FALLBACK_PIECES = ["▁the", "▁", "a", "▁▁x", "é", "日本", " plain", "<0x4>", "<0xZZ>", "\ufffd"]


def byte_level(folder: Path) -> Tokenizer:
    content = tokenizer_json()
    flags = content["added_tokens"][0]
    content["added_tokens"] += [
        flags | {"id": 265, "content": "<think>", "special": False},
        flags | {"id": 266, "content": "日 本", "special": False},  # not in the byte alphabet
        flags | {"id": 267, "content": "<日>", "special": True},
    ]
    return saved(content, folder / "byte_level.json")


def byte_fallback(folder: Path, strip: bool = True) -> Tokenizer:
    """The decoder of Llama 2 and Mistral: pieces with `▁`, and `<0x..>` for all the rest."""
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)] + BYTE_FALLBACK_PIECES
    content = tokenizer_json()
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    content["decoder"] = {"type": "Sequence", "decoders": steps}
    content["pre_tokenizer"] = None
    content["model"]["vocab"] = {piece: i for i, piece in enumerate(pieces)}
    content["model"]["merges"] = []
    flags = content["added_tokens"][0]
    content["added_tokens"] = [flags | {"id": i, "content": pieces[i]} for i in range(3)]
    return saved(content, folder / f"byte_fallback_{strip}.json")


def saved(content: dict[str, Any], path: Path) -> Tokenizer:
    write_json(path, content)
    return Tokenizer(path)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": byte_level(folder),
        "byte_fallback": byte_fallback(folder),
        "byte_fallback_without_strip": byte_fallback(folder, strip=False),
    }


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    by_piece = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    return [by_piece[piece] for piece in pieces]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_without_strip"])
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_equals_decode_of_all_ids(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5).map(sorted))
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    bounds = [0, *cuts, len(token_ids)]
    text = "".join(detokenizer.push(token_ids[a:b]) for a, b in zip(bounds, bounds[1:]))  # noqa: B905, RUF007
    assert text + detokenizer.flush() == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_without_strip"])
@settings(deadline=None, max_examples=300)
@given(text=st.text(max_size=20), data=st.data())
def test_bytes_of_real_text_in_any_place(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, data: st.DataObject
) -> None:
    """As above, but with whole and broken characters far more often than chance gives them."""
    tokenizer = tokenizers[kind]
    first_byte = 3  # in both vocabularies the bytes follow three special tokens, in their order
    token_ids = [first_byte + byte for byte in text.encode()]
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(token_ids)))
        token_ids.insert(place, data.draw(st.integers(0, tokenizer.vocab_size)))
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_no_half_character(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode("é😀", add_special_tokens=False)
    assert pieces_of(tokenizer, token_ids) == ["", "é", "", "", "", "😀", ""]


def test_a_character_that_never_became_whole(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode("😀", add_special_tokens=False)[:-1]
    assert pieces_of(tokenizer, token_ids) == ["", "", "", "\ufffd"]


def test_a_run_of_bytes_ends_before_it_shows(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    whole = ids_of(tokenizer, "<0xC3>", "<0xA9>", "a")
    assert pieces_of(tokenizer, whole) == ["", "", "éa", ""]
    broken = ids_of(tokenizer, "<0xC3>", "<0xA9>", "<0xC3>", "a")
    assert pieces_of(tokenizer, broken) == ["", "", "", "\ufffd\ufffd\ufffda", ""]


def test_only_the_first_blank_is_dropped(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    token_ids = ids_of(tokenizer, "▁the", "▁the", "▁▁x")
    assert pieces_of(tokenizer, token_ids) == ["the", " the", "  x", ""]


def test_special_tokens_are_skipped_or_shown(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = ids_of(tokenizer, "the", "<|im_end|>", "<think>", "<日>", "日 本")
    assert pieces_of(tokenizer, token_ids) == ["the", "", "<think>", "", "日 本", ""]
    shown = pieces_of(tokenizer, token_ids, skip=False)
    assert shown == ["the", "<|im_end|>", "<think>", "<日>", "日 本", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_token_costs_the_same_at_the_end_of_a_long_answer(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    """Even of bytes that never make a character: 20 times the tokens, not 400 times the time."""
    tokenizer = tokenizers[kind]
    byte = ids_of(tokenizer, "<0x80>" if kind == "byte_fallback" else "Ģ")

    def seconds(num_tokens: int) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer)
        started = time.perf_counter()
        for _ in range(num_tokens):
            detokenizer.push(byte)
        detokenizer.flush()
        return time.perf_counter() - started

    short = min(seconds(2_000) for _ in range(3))
    assert min(seconds(40_000) for _ in range(3)) < 100 * short


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
    ],
)
def test_other_decoders_are_refused(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    tokenizer = saved(tokenizer_json() | {"decoder": decoder}, tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match=r"tokenizer\.json: its decoder \(.*not supported"):
        IncrementalDetokenizer(tokenizer)
