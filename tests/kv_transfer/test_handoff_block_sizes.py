"""P and D have blocks of different sizes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kv_transfer import BlockLayout, MemoryHub, Reason
from tests.kv_transfer.handoff_ends import (
    COMMITTED,
    D_TABLE,
    P_TABLE,
    PUSHED,
    SENT,
    Clock,
    Decode,
    End,
    FakeRequest,
    Prefill,
    settle,
)
from tests.kv_transfer.pools import LAYOUT

NUM_TOKENS = 40

P_LAYOUT = msgspec.structs.replace(LAYOUT, num_layers=2, head_dim=2)


def layout_of(block_size: int) -> BlockLayout:
    num_bytes = P_LAYOUT.bytes_per_block * block_size // P_LAYOUT.block_size
    return msgspec.structs.replace(P_LAYOUT, block_size=block_size, bytes_per_block=num_bytes)


def rows_of(end: End, request: FakeRequest) -> NDArray[np.uint8]:
    """[tokens, layers, keys/values, row] that this end holds of the request."""
    layout = end.pool.layout
    shape = (-1, layout.num_layers, 2, layout.block_size, layout.row_bytes)
    blocks = end.pool.bytes.reshape(shape)[list(request.table)]
    rows = blocks.transpose(0, 3, 1, 2, 4).reshape(-1, layout.num_layers, 2, layout.row_bytes)
    return rows[: request.num_prompt_tokens]


@pytest.fixture
def p(hub: MemoryHub, clock: Clock) -> Iterator[Prefill]:
    end = Prefill(hub, "p", clock, layout=P_LAYOUT)
    yield end
    end.close()


@pytest.fixture(params=[1, 2, 8, 15, 24, 32, 64])
def d(hub: MemoryHub, clock: Clock, request: pytest.FixtureRequest) -> Iterator[Decode]:
    end = Decode(hub, clock, layout=layout_of(request.param))
    yield end
    end.close()


def table_at(d: Decode, num_tokens: int) -> list[int]:
    count = -(-num_tokens // d.pool.layout.block_size)
    return list(range(32, 32 - count, -1))


def arrives(p: Prefill, d: Decode, at_d: FakeRequest) -> None:
    p.until(lambda: SENT in p.told(at_d))
    d.until(lambda: COMMITTED in d.told(at_d))
    assert p.reasons(at_d) == [None]


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("num_tokens", [1, 17, 30])
def test_every_row_arrives_where_it_belongs(p: Prefill, d: Decode, num_tokens: int) -> None:
    at_p = p.add(d, num_tokens)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE[: at_p.num_blocks])
    d.poll()
    d.reserve(at_d, table_at(d, num_tokens))
    arrives(p, d, at_d)
    assert (rows_of(d, at_d) == rows_of(p, at_p)).all()
    row = P_LAYOUT.row_bytes * 2 * P_LAYOUT.num_layers
    assert p.connector.counts().bytes == num_tokens * row
    others = [n for n in range(1, 33) if n not in at_d.table]
    assert d.is_untouched(others)


@pytest.mark.usefixtures("nothing_is_left")
def test_chunk_by_chunk(p: Prefill, d: Decode) -> None:
    """No chunk ends where a block of D does, and nothing travels twice."""
    at_p = p.add(d, 30)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE[:1], 16)
    d.poll()
    d.reserve(at_d, table_at(d, 30))
    p.compute(at_p, P_TABLE[:2], 7)
    p.until(lambda: PUSHED in p.told(at_p))
    p.compute(at_p, P_TABLE[:2], 7)
    p.finish(at_p)
    arrives(p, d, at_d)
    assert (rows_of(d, at_d) == rows_of(p, at_p)).all()
    assert p.connector.counts().bytes == 30 * P_LAYOUT.row_bytes * 2 * P_LAYOUT.num_layers


@pytest.mark.usefixtures("nothing_is_left")
def test_what_was_given_up_is_pushed_again(p: Prefill, d: Decode) -> None:
    at_p = p.add(d, 30)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE[:1], 16)
    d.poll()
    d.reserve(at_d, table_at(d, 30))
    p.compute(at_p, P_TABLE[:2], 4)
    p.until(lambda: PUSHED in p.told(at_p))
    p.preempt(at_p)
    p.prefill_again(at_p, (20, 21))
    arrives(p, d, at_d)
    assert (rows_of(d, at_d) == rows_of(p, at_p)).all()


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("d", [1, 2, 8, 15, 24], indirect=True)
def test_what_d_has_does_not_travel(p: Prefill, d: Decode) -> None:
    num_cached = d.pool.layout.block_size
    at_p = p.add(d, 30)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE[:2])
    d.poll()
    d.reserve(at_d, table_at(d, 30), num_cached)
    arrives(p, d, at_d)
    assert (rows_of(d, at_d)[num_cached:] == rows_of(p, at_p)[num_cached:]).all()
    assert d.is_untouched(at_d.table[:1])


@pytest.mark.usefixtures("nothing_is_left")
def test_one_damaged_row_is_noticed(p: Prefill, d: Decode) -> None:
    at_p = p.add(d, 30)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE[:2])
    d.poll()
    d.reserve(at_d, table_at(d, 30))
    p.until(lambda: SENT in p.told(at_p))
    layout = d.pool.layout
    shape = (-1, layout.num_layers, 2, layout.block_size, layout.row_bytes)
    last = (30 - 1) % layout.block_size
    d.pool.bytes.reshape(shape)[at_d.table[-1], 1, 1, last, 0] ^= 1
    d.until(lambda: d.reasons(at_d) != [])
    assert d.reasons(at_d) == [Reason.CHECKSUM]
    d.end(at_d)
    settle(d, p)


def test_a_prompt_longer_than_the_room(hub: MemoryHub, clock: Clock, p: Prefill) -> None:
    d = Decode(hub, clock, layout=layout_of(8))
    at_p = p.add(d, NUM_TOKENS)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.poll()
    at_d.num_prompt_tokens = 24  # D was told of another prompt
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    assert p.reasons(at_p) == [Reason.LAYOUT]
    assert "has room for 24 tokens, but there are 40" in p.events[-1].detail
    d.close()
