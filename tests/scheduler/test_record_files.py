"""Files of recordings, and workloads in files that are recorded without a model."""

from __future__ import annotations

import errno
import json
import logging
import stat
from pathlib import Path

import msgspec
import pytest

from protocol import ConfigError
from scheduler import CacheConfig, ModelRunnerOutput, SchedulerConfig
from scheduler.observation import AFTER_DEFAULTS, EXPECT_DEFAULTS
from scheduler.record import Rerecording, main, open_recording
from scheduler.recording import RecordingScheduler
from scheduler.replay import load
from scheduler.trace import Trace, parse_trace
from tests.scheduler.recordings import (
    DIFFERENT,
    SHIPPED,
    MemoryFile,
    check_replays,
    recorded_life,
)
from tests.scheduler.test_random_life import random_world


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_file_that_is_cut_off_replays_up_to_its_last_whole_step(in_flight: int) -> None:
    data = recorded_life(random_world(7, in_flight=in_flight))
    data = b"\n".join(data.split(b"\n")[:12]).removesuffix(b",") + b"\n]}\n"
    whole = parse_trace(data).steps
    first, *lines, last, nothing = data.split(b"\n")
    assert (len(lines), last, nothing) == (len(whole), b"]}", b"")
    for size in range(len(first)):
        with pytest.raises(ConfigError, match="is no JSON"):
            parse_trace(data[:size])
    ends = [len(first)]  # by the number of whole steps
    for number in range(1, len(lines) + 1):
        ends.append(len(b"\n".join([first, *lines[:number]]).removesuffix(b",")))
    for size in range(ends[-5], len(data)):
        steps = parse_trace(data[:size]).steps
        assert steps == whole[: sum(end <= size for end in ends) - 1], size
    for number in range(len(whole) - 3, len(whole) + 1):
        check_replays(parse_trace(data[: ends[number] + 1]))


def test_what_is_wrong_in_a_file_that_is_cut_off_is_told() -> None:
    data = recorded_life(random_world(7, in_flight=1)).removesuffix(b"\n]}\n")
    with pytest.raises(ConfigError, match="unknown field `expekt`"):
        parse_trace(data.replace(b'"expect"', b'"expekt"', 1))


def test_what_is_written_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "node.json"
    config = SchedulerConfig(max_model_len=64)
    scheduler = RecordingScheduler(config, CacheConfig(num_blocks=9), stream=open_recording(path))
    assert load(path).steps == []
    for number in range(1, 4):
        step = scheduler.schedule()
        scheduler.update_from_output(step, ModelRunnerOutput())
        assert len(load(path).steps) == number
    scheduler.close()
    scheduler.close()
    scheduler.schedule()  # too late to be recorded
    assert json.loads(path.read_bytes())["format"] == 1
    assert len(load(path).steps) == 3


def test_only_its_owner_can_read_it_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    for text in (b"one", b"two", b"three"):
        with open_recording(path) as stream:
            stream.write(text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "node.json": b"three",
        "node.previous.json": b"one",
        "node.previous-2.json": b"two",
    }


class FullDisk(MemoryFile):
    room = 3

    def write(self, data: object) -> int:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)  # type: ignore[arg-type]


def test_a_full_disk_ends_the_recording_only(caplog: pytest.LogCaptureFixture) -> None:
    stream = FullDisk()
    scheduler = RecordingScheduler(
        SchedulerConfig(max_model_len=64), CacheConfig(num_blocks=9), stream=stream, name="node-0"
    )
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput())
    scheduler.close()
    assert len(parse_trace(stream.content).steps) == 2
    assert [r.message for r in caplog.records] == [
        "the recording of node-0 ends here: [Errno 28] No space left on device"
    ]


def inputs_only(trace: Trace) -> Trace:
    steps = [msgspec.structs.replace(step, expect={}, after=None) for step in trace.steps]
    return msgspec.structs.replace(trace, steps=steps)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name not in DIFFERENT])
def test_the_same_is_decided_again(name: str) -> None:
    recorded, stream = load(SHIPPED[name]), MemoryFile()
    for _ in Rerecording(inputs_only(recorded), stream).differences():
        pass
    again = parse_trace(stream.content)
    assert [EXPECT_DEFAULTS | (s.expect or {}) for s in again.steps] == [
        EXPECT_DEFAULTS | (s.expect or {}) for s in recorded.steps
    ]
    assert [AFTER_DEFAULTS | (s.after or {}) for s in again.steps] == [
        AFTER_DEFAULTS | (s.after or {}) for s in recorded.steps
    ]
    check_replays(again)


SCRIPT = """
config: {max_num_seqs: 2, max_num_batched_tokens: 8, max_model_len: 64,
         block_size: 4, num_blocks_including_null: 11}
steps:
- add: [{id: a, prompt_token_ids: [1, 2, 3], max_tokens: 5, arrival_time: 0},
        {id: b, prompt_token_ids: [1, 2, 3], max_tokens: 5, arrival_time: 0}]
- runner: {sampled: {b: [33]}}
- abort: [a]
"""


class TestCommand:
    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        return tmp_path / "out.json"

    def run(self, text: str, out: Path, suffix: str = ".yaml") -> int:
        script = out.with_name("script").with_suffix(suffix)
        script.write_text(text)
        return main([str(script), "--output", str(out)])

    def test_a_script(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(SCRIPT, out) == 0
        assert capsys.readouterr().out == f"{out}: recorded\n"
        trace = load(out)
        check_replays(trace)
        assert len(trace.steps) == 5
        runners = [s.runner for s in trace.steps if s.runner is not None]
        assert [list(r.sampled) for r in runners] == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"]]
        assert runners[1].sampled["b"] == [33]
        as_json = json.dumps(msgspec.yaml.decode(SCRIPT))
        first = out.read_bytes()
        assert self.run(as_json, out, ".json") == 0
        assert out.read_bytes() == first

    def test_a_trace_after_a_change(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """It is decided anew, and what is sampled follows."""
        trace = load(SHIPPED["spec_ngram_01"])
        changed = msgspec.structs.replace(trace.config, max_num_scheduled_tokens=9)
        text = msgspec.json.encode(msgspec.structs.replace(trace, config=changed)).decode()
        assert self.run(text, out, ".json") == 0
        assert "differs from" in capsys.readouterr().out
        check_replays(load(out))

    def test_what_stays(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(SCRIPT.replace("- abort: [a]", "- pause: PAUSED_ALL"), out) == 0
        assert "not all requests have ended" in capsys.readouterr().out
        check_replays(load(out))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("config: {", "script: cannot be read"),
            (SCRIPT.replace("max_num_seqs", "max_seqs"), "max_seqs"),
            (SCRIPT.replace("max_num_seqs: 2", "max_num_seqs: 0"), "must be at least 1"),
            (SCRIPT.replace("[1, 2, 3]", str([1] * 65)), "at most 40"),
            (SCRIPT.replace("block_size", "kv_connector: true, block_size"), "no such answers"),
        ],
    )
    def test_what_cannot_be_recorded(
        self, text: str, words: str, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(text, out) == 2
        assert words in capsys.readouterr().out

    def test_nowhere_to_write(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out.write_text("")
        script = out.with_name("script.yaml")
        script.write_text(SCRIPT)
        assert main([str(script), "-o", str(out / "file.json")]) == 2
        assert "cannot be written" in capsys.readouterr().out
