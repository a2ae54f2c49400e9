"""The last chunk travels layer by layer, while it is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest

from kv_transfer import MemoryHub
from tests.kv_transfer.handoff_ends import (
    BLOCK,
    CONFIG,
    D_TABLE,
    P_TABLE,
    PUSHED,
    Clock,
    Decode,
    FakeRequest,
    FakeStep,
    Prefill,
    arrives,
    kv_of,
)
from tests.kv_transfer.pools import LAYOUT

pytestmark = pytest.mark.usefixtures("nothing_is_left")

NUM_LAYERS = 4
LAYERED = msgspec.structs.replace(LAYOUT, num_layers=NUM_LAYERS, head_dim=1)
LAYER_BYTES = LAYERED.bytes_per_layer


class LayeredPrefill(Prefill):
    """Computes a step layer by layer."""

    def begin(self, request: FakeRequest, table: Sequence[int], num_tokens: int) -> None:
        request.table = tuple(table)
        self.connector.update_state_after_alloc(request, table, 0)
        step = FakeStep([request], num_new=num_tokens)
        self.connector.start_load_kv(self.connector.build_connector_meta(step))
        request.num_computed_tokens += num_tokens

    def compute_layer(self, request: FakeRequest, layer: int) -> None:
        piece = slice(layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES)
        for number, block_id in enumerate(request.table):
            if number * BLOCK < request.num_computed_tokens:
                self.pool.bytes[block_id, piece] = kv_of(request.ticket, number)[piece]
        self.connector.save_kv_layer(layer)


@pytest.fixture
def p(hub: MemoryHub, clock: Clock) -> Iterator[LayeredPrefill]:
    end = LayeredPrefill(hub, "p", clock, replace(CONFIG, layerwise=True), layout=LAYERED)
    yield end
    end.close()


@pytest.fixture
def d(hub: MemoryHub, clock: Clock) -> Iterator[Decode]:
    end = Decode(hub, clock, layout=LAYERED)
    yield end
    end.close()


def layer_is_at(d: Decode, at_d: FakeRequest, layer: int, first_block: int = 0) -> bool:
    piece = slice(layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES)
    return all(
        (d.pool.bytes[block_id, piece] == kv_of(at_d.ticket, number)[piece]).all()
        for number, block_id in enumerate(at_d.table[: at_d.num_blocks])
        if number >= first_block
    )


def bytes_under_way(p: Prefill, request: FakeRequest) -> int:
    return p.connector.sources[request.request_id].num_bytes


def has_pushed(
    p: Prefill, request: FakeRequest, num_layers: int, num_blocks: int
) -> Callable[[], bool]:
    return lambda: bytes_under_way(p, request) == num_layers * num_blocks * LAYER_BYTES


def test_a_layer_is_there_before_the_step_has_ended(p: LayeredPrefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    d.reserve(at_d, D_TABLE)  # D is told when P starts
    p.begin(at_p, P_TABLE, 40)
    d.poll()
    p.poll()
    for layer in range(NUM_LAYERS):
        p.compute_layer(at_p, layer)
        if layer < NUM_LAYERS - 1:
            p.until(has_pushed(p, at_p, layer + 1, 3))
            assert layer_is_at(d, at_d, layer)
            assert not layer_is_at(d, at_d, layer + 1)
            assert PUSHED not in p.told(at_p)  # no token has all its layers there
    assert p.finish(at_p)
    arrives(p, d, at_d)
    counts = p.connector.counts()
    assert (counts.bytes, counts.blocks) == (3 * LAYERED.bytes_per_block, 3)  # nothing twice


def test_layers_that_are_done_go_together(p: LayeredPrefill, d: Decode) -> None:
    """A write is under way while two more layers are computed."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    d.reserve(at_d, D_TABLE)
    p.begin(at_p, P_TABLE, 40)
    d.poll()
    gate = p.pool.gate(P_TABLE[0])
    p.compute_layer(at_p, 0)
    gate.wait_until_reached()
    p.compute_layer(at_p, 1)
    p.compute_layer(at_p, 2)
    assert bytes_under_way(p, at_p) == 0
    gate.open()
    p.until(has_pushed(p, at_p, 3, 3))
    assert all(layer_is_at(d, at_d, layer) for layer in range(3))
    p.compute_layer(at_p, 3)
    p.finish(at_p)
    arrives(p, d, at_d)
    assert p.connector.counts().bytes == 3 * LAYERED.bytes_per_block


def test_chunks_before_the_last_go_whole(p: LayeredPrefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    d.reserve(at_d, D_TABLE)
    p.begin(at_p, P_TABLE[:1], 16)
    d.poll()
    for layer in range(NUM_LAYERS):
        p.compute_layer(at_p, layer)
        assert not p.connector.sources[at_p.request_id].writing
    p.begin(at_p, P_TABLE, 24)
    p.until(lambda: PUSHED in p.told(at_p))
    assert bytes_under_way(p, at_p) == LAYERED.bytes_per_block
    p.compute_layer(at_p, 0)
    p.until(lambda: layer_is_at(d, at_d, 0, first_block=1))
    for layer in range(1, NUM_LAYERS):
        p.compute_layer(at_p, layer)
    p.finish(at_p)
    arrives(p, d, at_d)
    assert p.connector.counts().bytes == 3 * LAYERED.bytes_per_block


def test_a_preemption_in_the_middle(p: LayeredPrefill, d: Decode) -> None:
    """The layers that had travelled are those of blocks that were lost: all go once more."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    d.reserve(at_d, D_TABLE)
    p.begin(at_p, P_TABLE, 40)
    d.poll()
    p.compute_layer(at_p, 0)
    p.until(has_pushed(p, at_p, 1, 3))
    gate = p.pool.gate(P_TABLE[1])
    p.compute_layer(at_p, 1)
    gate.wait_until_reached()
    p.preempt(at_p)
    gate.open()
    p.until(lambda: not p.connector.sources[at_p.request_id].writing)
    p.begin(at_p, (20, 21, 22), 40)
    for layer in range(NUM_LAYERS):
        p.compute_layer(at_p, layer)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_layers_that_another_thread_computes(p: LayeredPrefill, d: Decode) -> None:
    """It only tells that a layer is there; the engine's thread pushes it."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    d.reserve(at_d, D_TABLE)
    p.begin(at_p, P_TABLE, 40)
    d.poll()
    p.poll()
    p._activity.clear()
    computing = threading.Thread(target=p.compute_layer, args=(at_p, 0))
    computing.start()
    computing.join()
    assert not p.connector.sources[at_p.request_id].writing
    assert p._activity.is_set()
    p.until(has_pushed(p, at_p, 1, 3))
    for layer in range(1, NUM_LAYERS):
        p.compute_layer(at_p, layer)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_a_destination_that_comes_in_the_middle(p: LayeredPrefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.begin(at_p, P_TABLE, 40)
    p.compute_layer(at_p, 0)
    p.compute_layer(at_p, 1)
    d.poll()
    d.reserve(at_d, D_TABLE)
    p.until(has_pushed(p, at_p, 2, 3))
    assert not layer_is_at(d, at_d, 2)
    p.compute_layer(at_p, 2)
    p.compute_layer(at_p, 3)
    p.finish(at_p)
    arrives(p, d, at_d)


def test_a_step_whose_layers_nobody_told_of(p: LayeredPrefill, d: Decode) -> None:
    """As with a model that runs as one graph: all goes at the end."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    d.reserve(at_d, D_TABLE)
    p.compute(at_p, P_TABLE, 40)
    d.poll()
    p.poll()
    assert not p.connector.sources[at_p.request_id].writing
    p.finish(at_p)
    arrives(p, d, at_d)
    assert p.connector.counts().bytes == 3 * LAYERED.bytes_per_block


def test_who_does_not_want_layers_is_not_told(hub: MemoryHub, clock: Clock) -> None:
    whole = Prefill(hub, "whole", clock)
    assert not whole.connector.saves_layers
    whole.close()
