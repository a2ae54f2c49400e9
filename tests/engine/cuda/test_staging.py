"""One copy a step, from memory that is not used again too early."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch

from engine.cuda.staging import StagingRing, staged_bytes
from tests.engine.cuda.deferred_stream import TIMEOUT_S, DeferredStream


def arrays(number: int) -> dict[str, np.ndarray]:
    return {
        "ids": np.arange(5, dtype=np.int64) * number,
        "tables": np.full((3, 2), number, dtype=np.int32),
        "none": np.empty(0, dtype=np.int64),
        "rest": np.full(number, 7, dtype=np.int32),
    }


def test_arrays_arrive_as_they_were(stream: DeferredStream) -> None:
    ring = StagingRing(stream, 4096)
    seen: list[dict[str, list[int]]] = []

    def note(device: dict[str, torch.Tensor]) -> None:
        seen.append({name: view.tolist() for name, view in device.items()})

    with stream.hold():
        for number in (1, 2):  # the second is filled before the first has been copied
            with ring.stage(arrays(number)) as staged:
                device = dict(staged.device)
                stream.submit(partial(note, device))
    stream.record().synchronize()
    assert seen == [{k: v.tolist() for k, v in arrays(n).items()} for n in (1, 2)]


def test_a_slot_is_filled_again_when_its_step_has_been_computed(stream: DeferredStream) -> None:
    ring = StagingRing(stream, 4096, num_slots=2)
    third_filled = threading.Event()

    def fill_a_third() -> None:
        with ring.stage(arrays(3)):
            third_filled.set()

    with stream.hold():
        for number in (1, 2):
            with ring.stage(arrays(number)) as staged:
                assert staged.host["ids"].tolist() == arrays(number)["ids"].tolist()
        thread = threading.Thread(target=fill_a_third)
        thread.start()
        assert not third_filled.wait(0.05)
    assert third_filled.wait(TIMEOUT_S)
    thread.join(TIMEOUT_S)


def test_arrays_of_the_same_shapes_lie_in_the_same_places(stream: DeferredStream) -> None:
    ring = StagingRing(stream, 4096)
    places = {name: view.data_ptr() for name, view in ring.views(arrays(2)).items()}
    for number in (2, 2, 3):  # in the last only what comes last has another shape
        with ring.stage(arrays(number)) as staged:
            for name, view in staged.device.items():
                assert view.data_ptr() == places[name]
                assert view.data_ptr() % 16 == places["ids"] % 16


def test_what_does_not_fit_is_not_cut_off(stream: DeferredStream) -> None:
    wanted = arrays(1)
    room = staged_bytes(wanted)
    with StagingRing(stream, room).stage(wanted):
        pass
    small = StagingRing(stream, room - 16)
    with pytest.raises(AssertionError, match="rest does not fit"), small.stage(wanted):
        pass


def test_dtypes_stay(stream: DeferredStream) -> None:
    views = StagingRing(stream, 4096).views(arrays(1))
    assert views["ids"].dtype == torch.int64
    assert views["tables"].dtype == torch.int32
