"""Packing against `AttentionMetadata`, which says the same for the plain runner."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import AttentionMetadata
from engine.cuda.flashinfer_attention import FlashInferBackend
from engine.cuda.packed_step import PackedStep
from engine.cuda.seats import Seats
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.runner_request import RunnerRequests
from protocol import SamplingParams
from scheduler import NewRequestData, SchedulerOutput
from scheduler.output import CachedRequestData
from tests.engine.cuda import reference_kernels
from tests.engine.cuda.deferred_stream import DeferredStream

BLOCK_SIZE, NUM_SEATS, MAX_BLOCKS = 4, 6, 12
MAX_LEN = BLOCK_SIZE * MAX_BLOCKS

Sequences = list[tuple[int, int, int]]  # (number of tokens, computed, scheduled)


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    chosen = []
    for _ in range(draw(st.integers(1, NUM_SEATS))):
        length = draw(st.integers(1, MAX_LEN))
        computed = draw(st.integers(0, length - 1))
        chosen.append((length, computed, draw(st.integers(1, length - computed))))
    return chosen


def tokens_of(number: int, length: int) -> list[int]:
    return [1000 * number + n for n in range(length)]


def blocks_of(number: int, length: int) -> list[int]:
    return [1 + number * MAX_BLOCKS + n for n in range(-(-length // BLOCK_SIZE))]


def pack(wanted: Sequences) -> tuple[PackedStep, Seats]:
    """Requests that get their last block by a diff."""
    requests, seats = RunnerRequests(), Seats(NUM_SEATS, MAX_BLOCKS)
    first, second = SchedulerOutput(), SchedulerOutput()
    for number, (length, computed, scheduled) in enumerate(wanted):
        table = blocks_of(number, length)
        first.scheduled_new_reqs.append(
            NewRequestData(
                f"r{number}", tokens_of(number, length), 1, SamplingParams(), table[:-1], 0
            )
        )
        second.scheduled_cached_reqs.append(
            CachedRequestData(f"r{number}", table[-1:], computed, length)
        )
        second.num_scheduled_tokens[f"r{number}"] = scheduled
    for step in (first, second):
        requests.update(step)
        seats.update(step, requests)
    return PackedStep.of(second.num_scheduled_tokens, requests, seats, BLOCK_SIZE), seats


def metadata_of(wanted: Sequences) -> AttentionMetadata:
    return AttentionMetadata.build(
        [scheduled for _, _, scheduled in wanted],
        [computed + scheduled for _, computed, scheduled in wanted],
        [blocks_of(number, length) for number, (length, _, _) in enumerate(wanted)],
        BLOCK_SIZE,
    )


@given(sequences())
@settings(deadline=None)
def test_positions_and_slots_are_those_of_the_metadata(wanted: Sequences) -> None:
    packed, seats = pack(wanted)
    metadata = metadata_of(wanted)
    assert packed.positions.tolist() == metadata.positions.tolist()
    assert packed.slots.tolist() == metadata.slot_mapping.tolist()
    expected = [
        tokens_of(number, length)[computed : computed + scheduled]
        for number, (length, computed, scheduled) in enumerate(wanted)
    ]
    assert packed.token_ids.tolist() == list(chain.from_iterable(expected))
    seat_of = [seats[f"r{number}"] for number in range(len(wanted))]
    assert packed.token_seats.tolist() == np.repeat(seat_of, list(map(len, expected))).tolist()
    assert packed.is_decode == all(len(tokens) == 1 for tokens in expected)


@given(sequences())
@settings(deadline=None)
def test_only_the_last_token_of_a_request_is_sampled(wanted: Sequences) -> None:
    packed, seats = pack(wanted)
    ends = np.cumsum([scheduled for _, _, scheduled in wanted]) - 1
    samples = [n for n, (length, computed, k) in enumerate(wanted) if computed + k == length]
    assert [request.request_id for request in packed.sampled] == [f"r{n}" for n in samples]
    assert packed.sampled_rows.tolist() == [ends[n] for n in samples]
    assert packed.sampled_seats.tolist() == [seats[f"r{n}"] for n in samples]


@given(sequences())
@settings(deadline=None)
def test_what_goes_to_the_device_says_where_keys_and_values_are(wanted: Sequences) -> None:
    packed, _ = pack(wanted)
    metadata = metadata_of(wanted)
    cache = KVCache(KVCacheConfig(1 + NUM_SEATS * MAX_BLOCKS, BLOCK_SIZE, 3, 2, 8))
    arrays = packed.inputs(cache)
    rows = cache.key_rows(metadata.slot_mapping)
    assert arrays["key_rows"].tolist() == rows.tolist()
    assert arrays["value_rows"].tolist() == (rows + BLOCK_SIZE).tolist()
    assert arrays["query_starts"].tolist() == list(metadata.query_starts)
    assert arrays["context_lens"].tolist() == list(metadata.context_lens)
    assert np.diff(arrays["context_starts"]).tolist() == list(metadata.context_lens)
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "token_ids": "int64",
        "token_seats": "int64",
        "positions": "int64",
        "key_rows": "int64",
        "value_rows": "int64",
        "query_starts": "int32",
        "context_lens": "int32",
        "context_starts": "int32",
    }


@given(sequences())
@settings(deadline=None, max_examples=50)
def test_pages_for_flashinfer_are_the_blocks_of_the_tables(wanted: Sequences) -> None:
    packed, _ = pack(wanted)
    metadata = metadata_of(wanted)
    arrays = flashinfer_arrays(packed)
    starts, pages = arrays["page_starts"], arrays["pages"]
    assert len(pages) == starts[-1]
    for number, context_len in enumerate(metadata.context_lens):
        own = pages[starts[number] : starts[number + 1]].tolist()
        assert own == metadata.block_tables[number, : len(own)].tolist()
        last = int(arrays["last_page_lens"][number])
        assert 1 <= last <= BLOCK_SIZE
        assert (len(own) - 1) * BLOCK_SIZE + last == context_len


def flashinfer_arrays(packed: PackedStep) -> dict[str, np.ndarray]:
    stream = DeferredStream()
    cache = KVCache(KVCacheConfig(1 + NUM_SEATS * MAX_BLOCKS, BLOCK_SIZE, 3, 2, 8))
    backend = FlashInferBackend(reference_kernels.Library, stream, cache, 4, (None,), MAX_LEN)
    stream.close()
    return dict(backend.arrays(packed))


def test_padding_adds_sequences_of_one_token_in_the_null_block() -> None:
    packed, _ = pack([(9, 8, 1), (5, 4, 1), (1, 0, 1)])
    padded = packed.padded(8)
    assert padded.is_decode
    assert padded.num_seqs == len(padded.token_ids) == 8
    assert padded.slots[:3].tolist() == packed.slots.tolist()
    assert padded.slots[3:].tolist() == [0] * 5
    assert padded.context_lens[3:].tolist() == [1] * 5
    assert padded.query_lens.tolist() == [1] * 8
    assert (padded.block_tables[3:] == 0).all()
    assert padded.sampled == packed.sampled
    arrays = flashinfer_arrays(padded)
    assert np.diff(arrays["page_starts"])[3:].tolist() == [1] * 5
    assert arrays["last_page_lens"][3:].tolist() == [1] * 5
    assert packed.padded(3) is packed


def test_a_seat_is_free_again_when_its_request_has_ended() -> None:
    requests, seats = RunnerRequests(), Seats(2, MAX_BLOCKS)

    def take(step: SchedulerOutput) -> None:
        requests.update(step)
        seats.update(step, requests)

    def new(name: str) -> NewRequestData:
        return NewRequestData(name, [1], 1, SamplingParams(), [3], 0)

    take(SchedulerOutput(scheduled_new_reqs=[new("a"), new("b")]))
    taken = {seats["a"], seats["b"]}
    take(SchedulerOutput(finished_req_ids=["a", "unknown"], scheduled_new_reqs=[new("c")]))
    assert {seats["b"], seats["c"]} == taken
    take(SchedulerOutput(preempted_req_ids=["b"], scheduled_resumed_reqs=[new("b")]))
    assert {seats["b"], seats["c"]} == taken
    assert len(seats) == 2
    assert torch.tensor(seats.tables(np.array([seats["b"]]), 1)).tolist() == [[3]]
