"""Which batch sizes have a graph, and which one a batch takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.decode_graphs import DecodeGraphs, DecodeWork, graph_sizes
from tests.engine.cuda.deferred_stream import DeferredStream


@pytest.mark.parametrize(
    ("max_num_seqs", "largest", "sizes"),
    [
        (1, 256, (1,)),
        (2, 256, (1, 2)),
        (3, 256, (1, 2, 4)),
        (8, 256, (1, 2, 4, 8)),
        (20, 256, (1, 2, 4, 8, 16, 24)),
        (500, 32, (1, 2, 4, 8, 16, 24, 32)),
        (16, 4, (1, 2, 4)),
        (16, 1, (1,)),
    ],
)
def test_sizes(max_num_seqs: int, largest: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs, largest) == sizes


@given(st.integers(1, 600), st.sampled_from([8, 64, 256, 512]))
def test_every_batch_up_to_the_limit_has_a_size_that_is_little_larger(
    max_num_seqs: int, largest: int
) -> None:
    sizes = graph_sizes(max_num_seqs, largest)
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 3 + largest // 8
    assert sizes[-1] >= min(max_num_seqs, largest)
    assert sizes[-1] < max_num_seqs + 8
    graphs = DecodeGraphs(DeferredStream.__new__(DeferredStream), dict.fromkeys(sizes))  # type: ignore[arg-type]
    for batch in range(1, max_num_seqs + 9):
        size = graphs.size_for(batch)
        if batch > sizes[-1]:
            assert size is None
        else:
            assert size is not None
            assert batch <= size < batch + 8


def test_a_graph_is_replayed_once_it_is_captured(stream: DeferredStream) -> None:
    calls: list[str] = []
    attention: object = None
    work = DecodeWork(attention, lambda: calls.append("forward"), torch.zeros(1))  # type: ignore[arg-type]
    graphs = DecodeGraphs(stream, {1: work})
    stream.submit(lambda: graphs.run(1))
    stream.record().synchronize()
    assert (len(calls), graphs.num_captured) == (1, 0)
    graphs.capture(1)
    stream.submit(lambda: graphs.run(1))
    stream.record().synchronize()
    assert graphs.num_captured == stream.graphs[0].num_replays == 1
