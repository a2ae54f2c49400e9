"""Recordings to test with: shipped ones, and those of random lives."""

from __future__ import annotations

import io
from pathlib import Path

from scheduler.recording import RecordingScheduler
from scheduler.replay import replay
from scheduler.trace import Trace, parse_trace
from tests.scheduler.random_life import Life, World

DATA = Path(__file__).parent.parent / "data" / "schedules"
COLLECTION = Path(__file__).parents[3] / "shared" / "conformance"
SHIPPED = {path.name.removesuffix(".json.gz"): path for path in sorted(DATA.glob("*.json.gz"))}
DIFFERENT = ("hazard_priority_uncomputed_hit", "worked_d_chunked_off_too_long")


class MemoryFile(io.BytesIO):
    """A file whose content can be looked at when it is closed."""

    content = b""

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()


def recorded_life(world: World) -> bytes:
    """What the scheduler of a life writes down."""
    life, stream = Life(world), MemoryFile()
    unused = life.scheduler  # nothing has happened to it
    recording = RecordingScheduler(
        unused.config, unused.kv.config, life.connector, stream=stream, name=f"life {world.seed}"
    )
    life.scheduler = recording
    life.live()
    recording.close()
    return stream.content


def recorded_trace(world: World) -> Trace:
    return parse_trace(recorded_life(world))


def check_replays(trace: Trace) -> None:
    assert replay(trace, exact_blocks=True) is None
    assert replay(trace) is None
