"""Records what the scheduler decides: of a node that serves, or of a workload in a file.

    python -m scheduler.record FILE --output OUT

FILE is a trace (`scheduler.trace`), of which only the inputs are taken: what was decided is decided
again. Or it is a script, in JSON or YAML: a trace without `expect`, each step of which is decided.
Tokens that are not given under `runner` are made up, and steps follow until all requests have
ended.

    config: {max_num_seqs: 2, max_num_batched_tokens: 8, max_model_len: 64,
             block_size: 4, num_blocks_including_null: 11}
    steps:
    - add: [{id: a, prompt_token_ids: [1, 2, 3], max_tokens: 5, arrival_time: 0}]
    - {}
    - abort: [a]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO

import msgspec

from protocol import ConfigError, KvrelayError
from scheduler.output import SchedulerOutput
from scheduler.recording import RecordingScheduler
from scheduler.replay import Difference, Replay, load
from scheduler.request import Request
from scheduler.trace import RunnerResult, Trace, TraceStep


def open_recording(path: Path) -> BinaryIO:
    """A new file that only its owner can read, because it will hold prompts.

    What earlier runs left there, which may have ended badly, is kept: as `NAME.previous.json`, then
    `NAME.previous-2.json` and so on, so that no restart takes an incident with it.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        ends = chain([""], (f"-{number}" for number in count(2)))
        names = (f"{path.stem}.previous{end}" for end in ends)
        path.replace(next(p for p in map(path.with_stem, names) if not p.exists()))
    path.touch(mode=0o600, exist_ok=False)
    return path.open("wb")


class Rerecording(Replay):
    """Feeds the inputs of a trace or a script to a scheduler that records."""

    scheduler: RecordingScheduler

    def __init__(self, trace: Trace, stream: BinaryIO) -> None:
        make_scheduler = partial(RecordingScheduler, stream=stream, name=trace.name)
        super().__init__(trace, exact_blocks=True, make_scheduler=make_scheduler)
        self.is_script = all(step.expect is None for step in trace.steps)
        self._moved = True  # whether the last step did anything

    def differences(self) -> Iterator[Difference]:
        """Records all steps. What differs from the trace, which for a script is nothing.

        Raises:
            ConfigError: the connector is asked something that the trace has no answer for.
            KvrelayError: a request is refused.
        """
        with contextlib.closing(self.scheduler):
            if not self.is_script:
                for difference in super().differences():
                    self._check_answered(difference)
                    yield difference
                return
            for number, step in enumerate(self._script()):
                for name, recorded, ours in self._run_step(step):
                    if name == "connector" and recorded != ours:
                        self._check_answered(Difference(number, name, recorded, ours))

    def _check_answered(self, difference: Difference) -> None:
        if difference.field == "connector":
            raise ConfigError("connector", f"has no such answers: {difference}")

    def _script(self) -> Iterator[TraceStep]:
        steps = self._trace.steps
        for step in steps:
            runner = step.runner or RunnerResult()
            yield msgspec.structs.replace(step, expect={}, runner=runner)
        while self.scheduler.has_requests() and self._moved:
            yield TraceStep(expect={}, runner=RunnerResult())

    def _sampled(self, computed: SchedulerOutput, runner: RunnerResult) -> dict[str, list[int]]:
        """What the step samples, were it not the one that was recorded."""
        self._moved = bool(computed.num_scheduled_tokens or computed.preempted_req_ids)
        if self._in_flight:
            return runner.sampled  # whoever samples in which step is not to be seen any more
        sampled = {}
        for request_id in computed.num_scheduled_tokens:
            tokens = runner.sampled.get(request_id, [])
            request = self.scheduler.requests.get(request_id)
            if request is not None and not request.status.finished:
                if not request.num_output_placeholders:
                    continue  # in the middle of its prompt
                num_drafts = len(computed.scheduled_spec_tokens.get(request_id, ()))
                tokens = tokens[: num_drafts + 1] or [_made_up(request)]
            if tokens:
                sampled[request_id] = tokens
        return sampled


def _made_up(request: Request) -> int:
    drawn = zlib.crc32(f"{request.request_id}/{len(request.output_token_ids)}".encode())
    return 10 + drawn % 990


def load_script(path: Path) -> Trace:
    """A trace, or a script in YAML.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    if path.suffix not in (".yaml", ".yml"):
        return load(path)
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Trace)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError("script", f"cannot be read: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 if nothing can be recorded of the file."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace or a script")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    options = parser.parse_args(arguments)
    try:
        trace = load_script(options.file)
        with open_recording(options.output) as stream:
            recording = Rerecording(trace, stream)
            differences = list(recording.differences())
    except KvrelayError as error:
        print(f"{options.file}: {error}")
        return 2
    except OSError as error:
        print(f"{options.output}: cannot be written: {error}")
        return 2
    if differences:
        print(f"{options.output}: recorded; differs from {options.file}: {differences[0]}")
    else:
        print(f"{options.output}: recorded")
    if recording.is_script and recording.scheduler.has_requests():
        print(f"{options.output}: not all requests have ended, and nothing goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
