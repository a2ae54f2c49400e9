"""Two connectors with a real scheduler and engine: files, which load within a step, and a shelf."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples.file_cache import FileCacheConnector
from kv_transfer import ConnectorContext, KVConnector, MultiConnector
from protocol import Role
from scheduler import RequestStatus
from tests.hash_model import LAYERS, expected_tokens, prompt_of
from tests.kv_transfer.connected_engine import BLOCK, BLOCK_BYTES, connected
from tests.kv_transfer.remote_shelf import Shelf, ShelfConnector

both = pytest.mark.parametrize("pipelined", [False, True], ids=["alternating", "pipelined"])


def files(directory: Path, **options: object) -> FileCacheConnector:
    options = {"directory": str(directory), **options}
    return FileCacheConnector(ConnectorContext("n", Role.UNIFIED, BLOCK, "hash", options))


def fill(connector: KVConnector, prompt: list[int]) -> None:
    """In the life of another engine."""
    with connected(connector, pipelined=False) as engine:
        engine.check({"filler": prompt})


@both
@pytest.mark.parametrize("files_first", [True, False])
def test_the_first_that_has_something_loads(
    tmp_path: Path, pipelined: bool, files_first: bool
) -> None:
    shelf: Shelf = {}
    fill(files(tmp_path), prompt_of(100)[:40])
    fill(ShelfConnector(shelf), prompt_of(100)[:80])
    on_shelf = ShelfConnector(shelf)
    children: list[KVConnector] = [files(tmp_path), on_shelf]
    with connected(
        MultiConnector(children if files_first else children[::-1]), pipelined=pipelined
    ) as engine:
        engine.check({"a": prompt_of(100)})
        assert engine.stats.prompt_loaded == (32 if files_first else 80)
        assert on_shelf.num_loads == (0 if files_first else 1)


@both
@pytest.mark.parametrize("shelf_has", [0, 80])
def test_the_second_loads_what_the_first_does_not_have(
    tmp_path: Path, pipelined: bool, shelf_has: int
) -> None:
    shelf: Shelf = {}
    fill(ShelfConnector(shelf), prompt_of(100)[:shelf_has] or prompt_of(20))
    multi = MultiConnector([files(tmp_path), ShelfConnector(shelf)])
    with connected(multi, pipelined=pipelined) as engine:
        engine.check({"a": prompt_of(100)})
        assert engine.stats.prompt_loaded == shelf_has


@both
def test_all_save(tmp_path: Path, pipelined: bool) -> None:
    shelf: Shelf = {}
    fill(MultiConnector([files(tmp_path), ShelfConnector(shelf)]), prompt_of(100))
    for connector in (files(tmp_path), ShelfConnector(shelf)):
        with connected(connector, pipelined=pipelined) as engine:
            engine.check({"a": prompt_of(100)})
            assert engine.stats.prompt_loaded == 96


def test_blocks_are_kept_until_the_last_has_read_them(tmp_path: Path) -> None:
    shelf: Shelf = {}
    multi = MultiConnector([ShelfConnector(shelf, rounds=9), files(tmp_path)])
    with connected(multi, pipelined=False) as engine:
        request = engine.add("a", prompt_of(100), max_tokens=1)
        while not request.status.finished or not list(tmp_path.rglob("*[0-9a-f]")):
            engine.step()
        for _ in range(5):  # the files have been written, the shelf has not
            engine.step()
            assert engine.scheduler.block_counts().used == 7
            assert shelf == {}
        engine.run_out()
        assert len(shelf) == 6


@both
@pytest.mark.parametrize("seed", range(6))
def test_a_random_life(tmp_path: Path, pipelined: bool, seed: int) -> None:
    """A small pool: preemptions, revoked pins, aborts, failed loads of both kinds."""
    rng = random.Random(seed)
    on_shelf = ShelfConnector({}, loss=0.2, revocable=True)
    children: list[KVConnector] = [files(tmp_path, max_bytes=20 * BLOCK_BYTES), on_shelf]
    rng.shuffle(children)
    asked = {}
    multi = MultiConnector(children)
    with connected(multi, pipelined=pipelined, num_blocks=20, max_num_seqs=3) as engine:
        for number in range(60):
            shared = prompt_of(120, rng.randrange(4))[: rng.randrange(100)]
            prompt = shared + prompt_of(rng.randint(1, 40), number)
            request = engine.add(f"r{number}", prompt, max_tokens=rng.randint(1, 40))
            asked[request] = prompt
            for _ in range(rng.randrange(12)):
                engine.step()
            if rng.random() < 0.1:
                victim = rng.choice(list(asked)).request_id
                engine.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
            if rng.random() < 0.2:
                engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
            if rng.random() < 0.2:
                damage(tmp_path, rng)
        engine.run_out()
        stats = engine.stats
    for request, prompt in asked.items():
        expected = expected_tokens(prompt, request.sampling)
        if request.status is RequestStatus.FINISHED_ABORTED:
            expected = expected[: len(request.output_token_ids)]
        assert request.output_token_ids == expected, request
    assert stats.num_preemptions > 0
    assert stats.prompt_loaded > 0
    assert on_shelf.num_loads > 0
    assert (multi._loader, multi._readers) == ({}, {})  # nothing is remembered of who has left


def damage(directory: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in directory.rglob("*") if path.is_file()] or [None])
    if path is not None:
        path.write_bytes(rng.randbytes(path.stat().st_size - rng.randrange(2)))


class LayerConnector(FileCacheConnector):
    """Hears of layers, and that a step has been computed."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self.heard: list[str] = []

    def save_kv_layer(self, layer: int) -> None:
        self.heard.append(f"layer {layer}")

    def wait_for_save(self) -> None:
        self.heard.append("saved")


@both
def test_layers_are_told_to_who_wants_them(tmp_path: Path, pipelined: bool) -> None:
    options = {"directory": str(tmp_path)}
    layers = LayerConnector(ConnectorContext("n", Role.UNIFIED, BLOCK, "hash", options))
    multi = MultiConnector([ShelfConnector({}), layers])
    with connected(multi, pipelined=pipelined, max_num_batched_tokens=16) as engine:
        engine.check({"a": prompt_of(40)}, max_tokens=2)
    told = [what for what in layers.heard if what != "saved"]
    # Three chunks of the prompt, and one token more.
    assert told == [f"layer {layer}" for layer in range(LAYERS)] * 4
    ends = [n for n, what in enumerate(layers.heard) if what == f"layer {LAYERS - 1}"]
    assert [layers.heard[n + 1] for n in ends] == ["saved"] * 4


def test_layers_cost_nothing_if_nobody_wants_them(tmp_path: Path) -> None:
    multi = MultiConnector([ShelfConnector({}), files(tmp_path)])
    with connected(multi, pipelined=False) as engine:
        assert engine.runner.on_layer is None
