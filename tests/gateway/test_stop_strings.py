"""The cut depends on the text alone, and nothing of a stop string is ever shown."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import IncrementalDetokenizer, Tokenizer
from gateway.stop_strings import StopStringScanner
from gateway.transcript import Piece, Transcript
from protocol import FinishReason, TokenChunk
from tests.gateway.byte_tokenizer import END, byte_tokenizer, ids


def whole_text_cut(text: str, stop_strings: Iterable[str]) -> tuple[str, str | None]:
    """The oracle: look at every prefix of the text, shortest first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scanned(pieces: Iterable[str], stop_strings: Iterable[str]) -> tuple[str, str | None]:
    scanner = StopStringScanner(tuple(stop_strings))
    shown = ""
    for piece in pieces:
        shown += scanner.feed(piece)
        if scanner.stopped is not None:
            return shown, scanner.stopped
    return shown + scanner.flush(), None


def split(text: str, cuts: Iterable[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


texts = st.text(alphabet="ab\né", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab\né", min_size=1, max_size=5), max_size=4)
cut_lists = st.lists(st.integers(0, 1000), max_size=20)


@given(texts, stop_lists, cut_lists)
def test_any_split_is_cut_like_the_whole_text(
    text: str, stop_strings: list[str], cuts: list[int]
) -> None:
    assert scanned(split(text, cuts), stop_strings) == whole_text_cut(text, stop_strings)


@given(texts, stop_lists, cut_lists)
def test_what_is_shown_never_has_to_be_taken_back(
    text: str, stop_strings: list[str], cuts: list[int]
) -> None:
    final, _ = whole_text_cut(text, stop_strings)
    scanner, shown = StopStringScanner(stop_strings), ""
    for piece in split(text, cuts):
        shown += scanner.feed(piece)
        assert final.startswith(shown)
        assert not any(stop in shown for stop in stop_strings)
        if scanner.stopped is not None:
            break


@given(texts, stop_lists)
def test_only_what_may_be_the_start_of_a_stop_string_is_held_back(
    text: str, stop_strings: list[str]
) -> None:
    scanner = StopStringScanner(stop_strings)
    shown = scanner.feed(text)
    held = text[len(shown) :]
    if scanner.stopped is None:
        assert held == "" or any(stop.startswith(held) for stop in stop_strings)


@pytest.mark.parametrize(
    ("pieces", "stop_strings", "shown", "stopped"),
    [
        (["a", "b", "c"], ["bc"], "a", "bc"),
        (["abc"], ["a"], "", "a"),
        (["xab", "y"], ["abc"], "xaby", None),
        (["aab"], ["ab"], "a", "ab"),
        (["aaa", "b"], ["aab"], "a", "aab"),
        (["abcd"], ["abcd", "bc"], "a", "bc"),  # complete first
        (["abc"], ["c", "bc"], "a", "bc"),  # complete together: the longest
        (["ab", "ab", "ac"], ["abac"], "ab", "abac"),
        (["\n", "\n"], ["\n\n"], "", "\n\n"),
        ([], ["x"], "", None),
        (["anything"], [], "anything", None),
    ],
)
def test_examples(
    pieces: list[str], stop_strings: list[str], shown: str, stopped: str | None
) -> None:
    assert scanned(pieces, stop_strings) == (shown, stopped)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def transcribed(
    tokenizer: Tokenizer,
    token_ids: tuple[int, ...],
    cuts: Iterable[int],
    stop_strings: Iterable[str],
    finish_reason: FinishReason,
) -> list[Piece]:
    """The pieces of an answer that comes in chunks which end at `cuts`."""
    transcript = Transcript(0, IncrementalDetokenizer(tokenizer), tuple(stop_strings))
    ends = sorted({len(token_ids), *(1 + cut % len(token_ids) for cut in cuts)})
    pieces: list[Piece] = []
    for begin, end in zip([0, *ends], ends, strict=False):
        last = end == len(token_ids)
        reason = finish_reason if last else None
        pieces.append(
            transcript.add(TokenChunk(token_ids=token_ids[begin:end], finish_reason=reason))
        )
        if pieces[-1].finish_reason is not None:
            break
    return pieces


@given(texts.filter(bool), stop_lists, cut_lists)
def test_tokens_that_split_characters_and_stop_strings(
    tokenizer: Tokenizer, text: str, stop_strings: list[str], cuts: list[int]
) -> None:
    token_ids = ids(text)
    pieces = transcribed(tokenizer, token_ids, cuts, stop_strings, FinishReason.LENGTH)
    whole = Piece.joined(pieces)
    shown, stopped = whole_text_cut(text, stop_strings)
    assert whole.text == shown
    assert whole.stop_reason == stopped
    assert whole.finish_reason is (FinishReason.LENGTH if stopped is None else FinishReason.STOP)
    # The tokens go as far as the one that completed the stop string, however they were chunked.
    spoken = text if stopped is None else shown + stopped
    assert whole.token_ids == ids(spoken)


@given(texts, cut_lists, st.booleans())
def test_the_token_that_ends_the_text_counts_and_is_not_shown(
    tokenizer: Tokenizer, text: str, cuts: list[int], with_stop_string: bool
) -> None:
    stop_strings = ("never",) if with_stop_string else ()
    for last in (END, ord("x")):  # end of text, and a stop token that has a text
        token_ids = (*ids(text), last)
        pieces = transcribed(tokenizer, token_ids, cuts, stop_strings, FinishReason.STOP)
        whole = Piece.joined(pieces)
        assert (whole.text, whole.token_ids) == (text, token_ids)
        assert whole.finish_reason is FinishReason.STOP


def test_a_character_cut_off_by_the_length_is_shown_as_replaced(tokenizer: Tokenizer) -> None:
    pieces = transcribed(tokenizer, ids("é")[:1], [], [], FinishReason.LENGTH)
    assert Piece.joined(pieces).text == "\ufffd"
    stopped = transcribed(tokenizer, ids("é")[:1], [], ["\ufffd"], FinishReason.LENGTH)
    assert Piece.joined(stopped).text == ""
    assert stopped[-1].finish_reason is FinishReason.STOP
