"""`python -m scheduler.replay`: what it says of each file, and its exit status."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler.replay import main
from tests.scheduler.recordings import SHIPPED

ROOT = Path(__file__).parents[2]
GOOD, OTHER = SHIPPED["worked_a_chunked_budget8"], SHIPPED["remote_send_01"]
HAZARD = SHIPPED["hazard_priority_uncomputed_hit"]
TOO_LONG = SHIPPED["worked_d_chunked_off_too_long"]

Document = dict[str, Any]
Write = Callable[[str, Callable[[Document], object]], Path]


def document(path: Path = GOOD) -> Document:
    loaded: Document = json.loads(gzip.decompress(path.read_bytes()))
    return loaded


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """The good file with a change, under another name."""

    def written(name: str, change: Callable[[Document], object]) -> Path:
        changed = document()
        change(changed)
        path = tmp_path / name
        path.write_text(json.dumps(changed))
        return path

    return written


@pytest.fixture
def different(write: Write) -> Path:
    return write("different.json", lambda d: d["steps"][1]["expect"].update(free_blocks=3))


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, list[str]]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out.splitlines()


@pytest.mark.parametrize("options", [(), ("--exact-blocks",)])
def test_runs_that_are_as_recorded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(document()))
    lines = [f"{path}: ok" for path in (GOOD, OTHER, plain)]
    assert run(capsys, *options, GOOD, OTHER, plain) == (0, lines)


def test_a_run_that_is_not(capsys: pytest.CaptureFixture[str], different: Path) -> None:
    ours = document()["steps"][1]["expect"]["free_blocks"]
    assert ours != 3
    line = f"{different}: differs: step 1: expect.free_blocks: recorded 3, ours {ours}"
    assert run(capsys, different) == (1, [line])


def test_blocks_that_have_other_names(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    def change(changed: Document) -> None:
        usable = changed["config"]["num_blocks_including_null"] - 1
        for step in changed["steps"]:
            for name in ("block_ids", "appended_block_ids"):
                for table in step["expect"].get(name, {}).values():
                    table[:] = [usable + 1 - block for block in table]

    path = write("renamed.json", change)
    assert run(capsys, path) == (0, [f"{path}: ok"])
    status, (line,) = run(capsys, "--exact-blocks", path)
    assert status == 1
    assert line.startswith(f"{path}: differs: step 0: expect.block_ids: recorded ")


def test_differences_that_are_meant(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    status, lines = run(capsys, HAZARD, TOO_LONG)
    assert status == 0
    assert lines[0] == (
        f"{HAZARD}: differs as expected, blocks whose tokens were taken back in the same step are "
        "not hit: step 4: expect.num_scheduled_tokens: recorded [['A', 6]], ours [['A', 8]]"
    )
    assert lines[1].startswith(
        f"{TOO_LONG}: differs as expected, settings and prompts that block the queue for ever are "
        "refused: refused: max_num_batched_tokens: must be at least max_model_len (256)"
    )
    unnamed = write("unnamed.json", lambda d: (d.update(document(HAZARD)), d.update(name="mine")))
    status, (line,) = run(capsys, unnamed)
    assert (status, "as expected" in line) == (1, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: d["config"].update(max_num_seqs=0),
            "differs: refused: max_num_seqs: must be at least 1, not 0",
        ),
        (
            lambda d: d["steps"][0]["add"][0].update(prompt_token_ids=[1] * 5000),
            "differs: refused: the prompt has 5000 tokens, but ",
        ),
        (
            lambda d: d["steps"][0]["add"][0].update(min_tokens=5000),
            "differs: refused: must be at most ",
        ),
        (
            lambda d: d["steps"].insert(0, {"runner": {}}),
            "differs: refused: runner: has results, but each step that was decided has its own",
        ),
    ],
)
def test_what_this_scheduler_refuses(
    capsys: pytest.CaptureFixture[str],
    write: Write,
    change: Callable[[Document], object],
    words: str,
) -> None:
    path = write("refused.json", change)
    status, (line,) = run(capsys, path)
    assert status == 1
    assert line.startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format=2), "format: must be 1, not 2"),
        (
            lambda d: d["config"].update(max_seqs=4),
            "is not in the trace format: Object contains unknown field `max_seqs` - at `$.config`",
        ),
        (
            lambda d: d["config"].update(block_size="16"),
            "is not in the trace format: Expected `int`, got `str` - at `$.config.block_size`",
        ),
        (
            lambda d: d["config"].pop("block_size"),
            "missing required field `block_size` - at `$.config`",
        ),
        (lambda d: d["steps"][1].update(paused=1), "`paused` - at `$.steps[1]`"),
        (lambda d: d["steps"][2].update(pause="A_LITTLE"), "'A_LITTLE' - at `$.steps[2].pause`"),
        (lambda d: d["steps"][0]["add"][0].pop("id"), "`id` - at `$.steps[0].add[0]`"),
        (lambda d: d.pop("steps"), "missing required field `steps`"),
    ],
)
def test_what_is_no_trace(
    capsys: pytest.CaptureFixture[str],
    write: Write,
    change: Callable[[Document], object],
    words: str,
) -> None:
    path = write("wrong.json", change)
    status, (line,) = run(capsys, path)
    assert status == 2
    assert line.startswith(f"{path}: ")
    assert words in line


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b"", "trace: is no JSON"),
        ("a.json", b"{", "trace: is no JSON"),
        ("a.json", b"steps: []", "trace: is no JSON"),
        ("a.json", b"[]", "trace: is not in the trace format: Expected `object`, got `array`"),
        ("a.json", b"\xff\xfe", "trace: is no JSON"),
        ("a.json", GOOD.read_bytes(), "trace: is no JSON"),
        ("a.json.gz", b"{}", "trace: cannot be read: Not a gzipped file"),
        ("a.json.gz", GOOD.read_bytes()[:-20], "trace: cannot be read: Compressed file ended"),
        ("a.json.gz", GOOD.read_bytes()[:50] + b"?" * 50, "trace: cannot be read: Error -3"),
    ],
    ids=range(9),
)
def test_what_is_no_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    status, (line,) = run(capsys, path)
    assert status == 2
    assert line.startswith(f"{path}: {words}")


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path / "nothing.json.gz", tmp_path):
        status, (line,) = run(capsys, path)
        assert status == 2
        assert line.startswith(f"{path}: trace: cannot be read: ")


def test_each_file_has_its_line_and_the_worst_its_status(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, different: Path
) -> None:
    nothing = tmp_path / "nothing.json"
    status, lines = run(capsys, nothing, different, GOOD, different)
    assert status == 2
    said = [(line.partition(": ")[0], line.partition(": ")[2].split()[0]) for line in lines]
    assert said == [
        (str(nothing), "trace:"), (str(different), "differs:"), (str(GOOD), "ok"),
        (str(different), "differs:"),
    ]  # fmt: skip
    assert run(capsys, different, nothing)[0] == 2
    assert run(capsys, different, GOOD)[0] == 1
    assert run(capsys, GOOD, OTHER)[0] == 0


def test_it_is_a_command(different: Path) -> None:
    command = [sys.executable, "-m", "scheduler.replay", "--exact-blocks", str(GOOD)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{GOOD}: ok\n", "")
    command[-1] = str(different)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1


def test_without_a_file_it_says_what_it_wants(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "FILE" in capsys.readouterr().err
