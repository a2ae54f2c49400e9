"""The example of a connector of one's own, with a real scheduler and engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_transfer import ConnectorContext, load_connector
from protocol import ConfigError, Role
from scheduler import RequestStatus
from tests.hash_model import prompt_of
from tests.kv_transfer.connected_engine import BLOCK, BLOCK_BYTES, ConnectedEngine, connected

FILE_BYTES = BLOCK_BYTES + 16
SPEC = "examples.file_cache:FileCacheConnector"


def context(**options: object) -> ConnectorContext:
    return ConnectorContext("n", Role.UNIFIED, BLOCK, "hash", options)


@contextmanager
def node(
    directory: Path, pipelined: bool, max_bytes: int = 1 << 20, **knobs: int
) -> Iterator[ConnectedEngine]:
    connector = load_connector(SPEC, context(directory=str(directory), max_bytes=max_bytes))
    with connected(connector, pipelined=pipelined, **knobs) as engine:
        yield engine


def files(directory: Path) -> list[Path]:
    """The least recently used first."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


both = pytest.mark.parametrize("pipelined", [False, True], ids=["alternating", "pipelined"])


@both
def test_a_prompt_is_loaded_after_a_reset_of_the_cache(tmp_path: Path, pipelined: bool) -> None:
    with node(tmp_path, pipelined) as engine:
        engine.check({"a": prompt_of(100)})
        assert len(files(tmp_path)) == 6  # 103 tokens were computed
        engine.reset()
        engine.check({"b": prompt_of(100)})
        assert engine.stats.prompt_loaded == 96
        assert engine.stats.prompt_computed == 104


@both
def test_a_prompt_is_loaded_after_a_restart(tmp_path: Path, pipelined: bool) -> None:
    with node(tmp_path, pipelined) as engine:
        engine.check({"a": prompt_of(100)}, max_tokens=40)
    with node(tmp_path, pipelined) as engine:
        engine.check({"b": prompt_of(100)[:50] + prompt_of(30, seed=1)})
        assert engine.stats.prompt_loaded == 48
        assert engine.stats.prompt_computed == 32


@both
def test_tokens_that_are_not_computed_are_neither_saved_nor_loaded(
    tmp_path: Path, pipelined: bool
) -> None:
    with node(tmp_path, pipelined) as engine:
        answer = engine.add("a", prompt_of(92), max_tokens=4)
        engine.run_out()
        assert len(files(tmp_path)) == 5  # the last of 96 tokens was sampled
        engine.reset()
        engine.check({"b": [*answer.all_token_ids, *prompt_of(10)]})
        assert engine.stats.prompt_loaded == 80
        assert len(files(tmp_path)) == 6
        engine.reset()
        engine.check({"c": list(answer.all_token_ids)})
        assert engine.stats.prompt_loaded == 80 + 80  # the last one is computed for its logits


@both
def test_output_is_loaded_too(tmp_path: Path, pipelined: bool) -> None:
    with node(tmp_path, pipelined) as engine:
        answer = engine.add("a", prompt_of(30), max_tokens=40)
        engine.run_out()
        engine.reset()
        engine.check({"b": list(answer.all_token_ids)})
        assert engine.stats.prompt_loaded == 64  # of 70; the last one was never computed


@both
def test_what_the_prefix_cache_has_is_not_loaded(tmp_path: Path, pipelined: bool) -> None:
    with node(tmp_path, pipelined) as engine:
        engine.check({"a": prompt_of(100)})
        engine.reset()
        engine.check({"b": prompt_of(100)[:40]})
        engine.check({"c": prompt_of(100)})
        assert engine.stats.prompt_loaded == 32 + 64


@both
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_damaged_file_is_computed_again(
    tmp_path: Path, pipelined: bool, damage: str, number: int
) -> None:
    with node(tmp_path, pipelined) as engine:
        engine.check({"a": prompt_of(100)})
        engine.reset()
        path = files(tmp_path)[number]  # they were written in the order of the prompt
        data = path.read_bytes()
        if damage == "truncated":
            path.write_bytes(data[:-1])
        elif damage == "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        else:
            path.unlink()
        # The second hits, within the same step, what the first loads.
        engine.check({"b": prompt_of(100), "c": [*prompt_of(100)[:97], 5, 6, 7]}, max_tokens=9)
        assert engine.stats.prompt_loaded == 96
        engine.reset()
        engine.check({"d": prompt_of(100)})
        assert engine.stats.prompt_loaded == 192  # the file was written again


@both
def test_room_is_bounded_and_what_was_not_used_for_longest_goes(
    tmp_path: Path, pipelined: bool
) -> None:
    room = 8 * FILE_BYTES + 1
    old, used, new = prompt_of(33, 1), prompt_of(33, 2), prompt_of(97, 3)
    with node(tmp_path, pipelined, room) as engine:
        engine.check({"old": old})
        engine.check({"used": used})
        engine.reset()
        engine.check({"old again": old})
        engine.reset()
        engine.check({"used again": used})
        assert engine.stats.prompt_loaded == 64
        engine.check({"new": new})
        assert len(files(tmp_path)) == 8
        assert sum(path.stat().st_size for path in files(tmp_path)) <= room
    with node(tmp_path, pipelined, room) as engine:
        engine.check({"used": used, "new": new})
        assert engine.stats.prompt_loaded == 32 + 96
        engine.check({"old": old})
        assert engine.stats.prompt_loaded == 32 + 96


@both
def test_what_was_used_last_stays_when_there_is_less_room(tmp_path: Path, pipelined: bool) -> None:
    with node(tmp_path, pipelined) as engine:
        engine.check({"used": prompt_of(33, 1)})
        engine.check({"unused": prompt_of(33, 2)})
        engine.reset()
        engine.check({"used again": prompt_of(33, 1)})
    with node(tmp_path, pipelined, 2 * FILE_BYTES) as engine:
        assert len(files(tmp_path)) == 2
        engine.check({"used": prompt_of(33, 1)})
        assert engine.stats.prompt_loaded == 32


def test_an_aborted_request_leaves_no_file(tmp_path: Path) -> None:
    with node(tmp_path, pipelined=True) as engine:
        engine.add("a", prompt_of(100))
        engine.step()
        engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        engine.run_out()
        assert files(tmp_path) == []


def test_a_file_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    with node(tmp_path, pipelined=False) as engine:
        engine.check({"a": prompt_of(100)})
        first = files(tmp_path)[0]
    first.rename(first.with_suffix(".part"))
    with node(tmp_path, pipelined=False) as engine:
        assert len(files(tmp_path)) == 5
        engine.check({"b": prompt_of(100)})
        assert engine.stats.prompt_loaded == 0
        assert len(files(tmp_path)) == 6


@both
def test_many_requests_in_a_small_pool(tmp_path: Path, pipelined: bool) -> None:
    """Preemptions, evictions, and files that go before they are read."""
    prompts = {
        f"r{n}": prompt_of(120, n % 5)[: 40 + 13 * n % 80] + prompt_of(3 + 7 * n, n)
        for n in range(16)
    }
    with node(tmp_path, pipelined, 20 * FILE_BYTES, num_blocks=24, max_num_seqs=3) as engine:
        for turn in range(3):
            engine.check({f"{name}/{turn}": p for name, p in prompts.items()}, max_tokens=30)
            engine.reset()
        assert engine.stats.prompt_loaded > 0
        assert len(files(tmp_path)) <= 20


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "directory"),
        ({"directory": 7}, "directory"),
        ({"directory": "d", "max_bytes": "1 GB"}, "max_bytes"),
        ({"directory": "d", "size": 1}, "size"),
    ],
)
def test_wrong_options(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_connector(SPEC, context(**options))
    assert caught.value.field == field
