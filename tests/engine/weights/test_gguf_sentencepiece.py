"""SentencePiece vocabularies of GGUF files, against merging by score one pair at a time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.weights import ModelStore
from engine.weights.gguf_file import GGUFFile
from engine.weights.gguf_tokenizer import GGUFTokenizer
from gateway.detokenizer import IncrementalDetokenizer
from gateway.tokenizer import Tokenizer as GatewayTokenizer
from protocol import ModelError
from tests.engine.weights.tiny_models import TinyGGUF

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = list("▁theormdan,")
# In the order of training: those that stand earlier have the better score.
PIECES = ["▁t", "he", "▁the", "or", "▁a", "and", "▁m", "he▁", "ther", "▁mo", "om", "an", "nd"]
USER_DEFINED = ["[INST]"]
VOCABULARY = [*SPECIAL, *BYTES, *PIECES, *CHARACTERS, *USER_DEFINED]
SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) + len(CHARACTERS))] + [0.0]
TYPES = [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) + len(CHARACTERS)) + [4]


def metadata(**changes: Any) -> dict[str, tuple[Any, Kind]]:
    values = {
        "tokenizer.ggml.model": ("llama", Kind.STRING),
        "tokenizer.ggml.pre": ("default", Kind.STRING),
        "tokenizer.ggml.tokens": (VOCABULARY, Kind.ARRAY),
        "tokenizer.ggml.scores": (SCORES, Kind.ARRAY),
        "tokenizer.ggml.token_type": (TYPES, Kind.ARRAY),
        "tokenizer.ggml.bos_token_id": (1, Kind.UINT32),
        "tokenizer.ggml.eos_token_id": (2, Kind.UINT32),
    }
    return values | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def described(folder: Path, **changes: Any) -> GGUFTokenizer:
    tiny = TinyGGUF(metadata=metadata(**changes), tensors={})
    return GGUFTokenizer(GGUFFile(tiny.write(folder / "spm.gguf")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_str(described(tmp_path_factory.mktemp("spm")).tokenizer_json())


def merged(text: str) -> list[int]:
    """Join the two neighbours that make the best piece, the first ones of several, until none do;
    what is not in the vocabulary then becomes its bytes."""
    scores = dict(zip(PIECES + CHARACTERS, SCORES[259:-1], strict=True))
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        places = [place for place, pair in enumerate(pairs) if pair in scores]
        if not places:
            break
        best = max(places, key=lambda place: (scores[pairs[place]], -place))
        symbols[best : best + 2] = [pairs[best]]
    ids: list[int] = []
    for symbol in symbols:
        known = symbol in scores
        ids += [VOCABULARY.index(symbol)] if known else [3 + byte for byte in symbol.encode()]
    return ids


TEXTS = st.text(alphabet="theormdan, é\n😀", max_size=30)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_joins_what_has_the_best_score(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False).ids == merged(text)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_bos_comes_first_unless_the_file_says_no(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the").ids == [1, VOCABULARY.index("▁the")]
    other = described(tmp_path, add_bos_token=(False, Kind.BOOL)).tokenizer_json()
    assert Tokenizer.from_str(other).encode("the").ids == [VOCABULARY.index("▁the")]


def test_special_tokens_are_found_in_text(tokenizer: Tokenizer) -> None:
    the = VOCABULARY.index("▁the")
    ids = tokenizer.encode("[INST]the</s>the", add_special_tokens=False).ids
    assert ids == [VOCABULARY.index("[INST]"), the, 2, the]


def test_without_the_blank_in_front(tmp_path: Path) -> None:
    content = described(tmp_path, add_space_prefix=(False, Kind.BOOL)).tokenizer_json()
    tokenizer = Tokenizer.from_str(content)
    ids = tokenizer.encode("he the", add_special_tokens=False).ids
    assert ids == [VOCABULARY.index("he"), VOCABULARY.index("▁the")]
    assert tokenizer.decode([VOCABULARY.index("▁the")]) == " the"


def test_the_gateway_can_stream_it(tmp_path: Path) -> None:
    tiny = TinyGGUF()
    for key in [key for key in tiny.metadata if key.startswith("tokenizer.")]:
        del tiny.metadata[key]
    tiny.metadata |= metadata()
    embeddings, kind = tiny.tensors["token_embd.weight"]
    tiny.tensors["token_embd.weight"] = (embeddings.repeat(2, axis=0)[: len(VOCABULARY)], kind)
    files = ModelStore(tmp_path / "cache").resolve(str(tiny.write(tmp_path / "llama2.gguf")))
    assert (files.bos_token_id, files.eos_token_ids) == (1, (2,))
    assert json.loads((files.directory / "tokenizer_config.json").read_text())["bos_token"] == "<s>"
    tokenizer = GatewayTokenizer.load(files)
    text = "the mother and é, 😀"
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push(tokenizer.encode(text, add_special_tokens=True)) + stream.flush() == text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scores": (SCORES[:-1], Kind.ARRAY)}, "scores has 283 entries for 284 tokens"),
        ({"token_type": ([1, 2], Kind.ARRAY)}, "token_type has 2 entries for 284 tokens"),
        ({"tokens": (["a", "a"], Kind.ARRAY)}, "a token twice"),
    ],
)
def test_refuses_and_says_why(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        described(tmp_path, **changes)
