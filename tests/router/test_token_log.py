from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from protocol import Delta, FinishReason, TokenLogprobs
from router.token_log import TokenLog

OUTPUT = tuple(range(100, 124))  # what every attempt makes: no token is there twice

LOGPROBS = tuple(TokenLogprobs(-float(token)) for token in OUTPUT)


def delta(
    start: int, end: int, attempt: int = 0, finish_reason: FinishReason | None = None
) -> Delta:
    return Delta(
        request_id="r",
        attempt=attempt,
        position=start,
        token_ids=OUTPUT[start:end],
        finish_reason=finish_reason,
        logprobs=LOGPROBS[start:end],
    )


def test_tokens_in_order_are_due_at_once() -> None:
    log = TokenLog()
    deltas = [delta(0, 1), delta(1, 4), delta(4, 5)]
    assert [log.add(each) for each in deltas] == [[each] for each in deltas]
    assert log.emitted == list(OUTPUT[:5])


def test_what_comes_too_early_waits() -> None:
    log = TokenLog()
    late, early = delta(0, 1), delta(1, 4, finish_reason=FinishReason.LENGTH)
    assert log.add(early) == []
    assert log.emitted == []
    assert log.add(late) == [late, early]
    assert log.emitted == list(OUTPUT[:4])


def test_an_end_without_tokens_waits_for_its_turn() -> None:
    log = TokenLog()
    end = delta(3, 3, finish_reason=FinishReason.STOP)
    assert log.add(end) == []
    log.add(delta(0, 2))
    assert log.add(delta(2, 3))[-1] == end


def test_a_shorter_delta_does_not_take_the_place_of_a_longer_one() -> None:
    """A piece that came again alone, while the whole still waits."""
    log = TokenLog()
    log.add(delta(1, 5, finish_reason=FinishReason.LENGTH))
    log.add(delta(1, 2))
    due = log.add(delta(0, 1))
    assert log.emitted == list(OUTPUT[:5])
    assert any(each.finish_reason for each in due)


def test_what_is_partly_known_adds_the_rest() -> None:
    log = TokenLog()
    log.add(delta(0, 3))
    log.add(delta(1, 5))
    log.add(delta(0, 2))
    assert log.emitted == list(OUTPUT[:5])


def test_an_attempt_that_is_over_leaves_nothing_ahead() -> None:
    log = TokenLog()
    log.add(delta(0, 1))
    log.add(Delta(request_id="r", attempt=0, position=3, token_ids=(7, 7, 7)))
    log.forget_ahead()
    log.add(delta(1, 3, attempt=1))
    assert log.emitted == list(OUTPUT[:3])


pieces = st.tuples(st.integers(0, len(OUTPUT)), st.integers(0, 5)).map(
    lambda piece: (piece[0], min(piece[0] + piece[1], len(OUTPUT)))
)


@given(st.lists(st.lists(pieces, max_size=12), max_size=4))
def test_each_token_once_and_in_order_whatever_comes(
    attempts: Sequence[Sequence[tuple[int, int]]],
) -> None:
    """The oracle: of what is known without a gap, from the beginning, everything is emitted."""
    log = TokenLog()
    emitted: set[int] = set()
    for number, attempt in enumerate(attempts):
        known = set(emitted)
        for start, end in attempt:
            before = len(log.emitted)
            due = log.add(delta(start, end, attempt=number))
            known |= set(range(start, end))
            expected = next(n for n in range(len(OUTPUT) + 1) if n not in known)
            assert log.emitted == list(OUTPUT[:expected])
            assert log.logprobs == list(LOGPROBS[:expected])
            assert all(each.position <= expected for each in due)
            assert bool(due) == (start <= before)
        emitted = set(range(len(log.emitted)))
        log.forget_ahead()


@given(st.data())
def test_deltas_of_two_nodes_in_any_order_and_any_number(data: st.DataObject) -> None:
    """P tells the first token, D the rest in chunks; the network repeats and reorders them."""
    cuts = sorted(data.draw(st.sets(st.integers(2, len(OUTPUT) - 1))))
    bounds = [0, 1, *cuts, len(OUTPUT)]
    chunks = [delta(a, b) for a, b in itertools.pairwise(bounds)]
    chunks[-1] = delta(bounds[-2], bounds[-1], finish_reason=FinishReason.LENGTH)
    sent = [*chunks, *data.draw(st.lists(st.sampled_from(chunks), max_size=5))]
    log = TokenLog()
    due: list[Delta] = []
    for each in data.draw(st.permutations(sent)):
        due.extend(log.add(each))
        assert log.emitted == list(OUTPUT[: len(log.emitted)])
    assert log.emitted == list(OUTPUT)
    assert sorted(each.position for each in due) == sorted(each.position for each in sent)
    first_end = next(n for n, each in enumerate(due) if each.finish_reason)
    assert all(each in due[: first_end + 1] for each in chunks), "the end was due too early"
