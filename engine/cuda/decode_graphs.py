"""CUDA graphs for decodes: a step of some tokens is bound by the host that launches its kernels.

batch of 5      padded to 8, and the graph for 8 is replayed
batch of 300    no graph is so large: its kernels are launched one by one
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.cuda.attention_backend import DecodeAttention
from engine.cuda.stream import Graph, Stream

_FIRST_SIZES = (1, 2, 4)
_STEP = 8


def graph_sizes(max_num_seqs: int, largest: int) -> tuple[int, ...]:
    """Batch sizes that have a graph: 1, 2, 4, then multiples of 8, as far as they are of use.

    The number of graphs, and with it their memory, is bounded by `largest`.
    """
    ladder = (*_FIRST_SIZES, *range(_STEP, largest + 1, _STEP))
    useful = bisect_left(ladder, max_num_seqs) + 1  # one that holds all, and none above it
    return tuple(size for size in ladder[:useful] if size <= largest)


@dataclass(frozen=True)
class DecodeWork:
    """A decode of one batch size over tensors that stay where they are."""

    attention: DecodeAttention
    forward: Callable[[], None]  # queues all of it
    hidden: Tensor  # [size, hidden_size], where its result is


class DecodeGraphs:
    """Graphs of one runner; they share memory, since never two of them run at once."""

    def __init__(self, stream: Stream, work: Mapping[int, DecodeWork]) -> None:
        """`work` by its batch size. Nothing is captured yet: then it is launched kernel by kernel,
        and gives the same numbers."""
        self._stream = stream
        self._work = work
        self._sizes = sorted(work)
        self._graphs: dict[int, Graph] = {}

    def size_for(self, num_seqs: int) -> int | None:
        """The batch size to pad to; None: there is none so large."""
        place = bisect_left(self._sizes, num_seqs)
        return self._sizes[place] if place < len(self._sizes) else None

    def work(self, size: int) -> DecodeWork:
        return self._work[size]

    def capture(self, size: int) -> None:
        """Its attention has been planned. The largest first, whose memory the others share."""
        self._graphs[size] = self._stream.capture(self._work[size].forward)

    def run(self, size: int) -> None:
        """Within work that is submitted."""
        graph = self._graphs.get(size)
        if graph is None:
            self._work[size].forward()
        else:
            graph.replay()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    @property
    def num_captured(self) -> int:
        return len(self._graphs)
