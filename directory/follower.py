"""What the server tells of all nodes: their records, and their block events for the subscribers.

Each answer of the server is of one instant, so what it says can be put together:

    events       … 6  7 │ 8  9   (read up to the newest)      every number is either delivered
    sequences    up to 9 were published                       or covered by a `Gap`

    - a number is skipped: what is missing was trimmed or lost              Gap, then the batch
    - a number is repeated: a publisher did not see that it had arrived     ignored
    - more was published than can be read: trimmed, lost, or never sent     Gap

A data set that is another one (its epoch), or that runs behind what was read, is read from its
start; the numbers tell what of it is new. Until the nodes have registered there their records stay.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from directory.directory import Gap, NodeRecord
from directory.event_queue import EventQueues
from directory.server_codec import (
    LatestGeneration,
    NumberedBatch,
    Registration,
    WrittenStatus,
    decode_batches,
    decode_generation,
    decode_registration,
    decode_span,
    decode_status,
)
from directory.server_link import Command
from directory.server_scripts import MAX_GENERATIONS, ServerScripts
from protocol import NodeStatus

MAX_ENTRIES = 256  # in one answer; the server does nothing else meanwhile
RESTORE_GRACE_S = 5.0  # for nodes to register again on a server that has lost its data
_START = "0-0"  # before the first entry

logger = logging.getLogger(__name__)


@dataclass
class _Followed:
    registration: Registration
    heard_at: float  # when its last heartbeat was made
    blind_then: float  # the blind time when we heard of it
    beat: str = ""  # names that heartbeat
    status: NodeStatus | None = None
    missing_since: float | None = None  # in a data set that may have lost it

    @property
    def generation(self) -> int:
        return self.registration.info.generation

    def record(self, now: float, blind_s: float) -> NodeRecord:
        age_s = max(0.0, now - self.heard_at)
        return NodeRecord(
            info=self.registration.info,
            status=self.status,
            heartbeat_age_s=age_s,
            ttl_s=self.registration.ttl_s,
            blind_s=min(age_s, blind_s - self.blind_then),
        )


@dataclass(frozen=True)
class Answer:
    """To `Follower.question`. Absent: the same as before, or not asked for."""

    epoch: str
    version: str
    now_ms: int  # by the server's clock
    newest: str  # the last entry of the stream
    entries: list[tuple[str, list[NumberedBatch]]]  # with their ids
    nodes: dict[bytes, bytes] | None
    generations: dict[str, LatestGeneration]
    statuses: dict[bytes, bytes] | None
    sequences: dict[bytes, bytes] | None

    @classmethod
    def parse(cls, reply: Any) -> Answer:
        """Raises ValueError or TypeError: it is no such answer."""
        epoch, version, now_ms, newest, entries, nodes, generations, statuses, sequences = reply
        return cls(
            epoch=epoch.decode(),
            version=version.decode(),
            now_ms=int(now_ms),
            newest=newest.decode(),
            entries=[
                (entry.decode(), decode_batches(payload) or [])
                for entry, payload in zip(entries[::2], entries[1::2], strict=True)
            ],
            nodes=_pairs(nodes),
            generations={
                node_id.decode(): latest
                for node_id, blob in (_pairs(generations) or {}).items()
                if (latest := decode_generation(blob)) is not None
            },
            statuses=_pairs(statuses),
            sequences=_pairs(sequences),
        )


class Follower:
    """Not thread-safe: its directory holds a lock around all of it. Talks to nobody."""

    def __init__(self, scripts: ServerScripts, queues: EventQueues, slack_s: float) -> None:
        self._scripts = scripts
        self._queues = queues
        self._slack_s = slack_s  # usual between two answers; what is above is blind time
        self._nodes: dict[str, _Followed] = {}
        self.generations: dict[str, int] = {}  # the latest ever heard of
        self._seen: dict[str, int] = {}  # node id → the last number delivered, or told as a gap
        self._epoch = ""
        self._version = ""
        self._cursor = ""  # the last entry read
        self._doubtful = False
        self._asked_at: float | None = None  # what was answered last
        self._full_at = 0.0  # the same, with statuses
        self._blind_s = 0.0  # up to the last answer
        self.caught_up = False  # that answer held all there was

    def question(self, token: str, *, full: bool) -> Command:
        """With `full`, of statuses and published numbers, too."""
        return self._scripts.read(
            version=self._version,
            cursor=self._cursor,
            max_entries=MAX_ENTRIES,
            full=full,
            token=token,
        )

    def expect_losses(self) -> None:
        """The server was away: who is not there any more has not left."""
        self._doubtful = True
        self._version = ""

    def take(self, answer: Answer, asked_at: float, now: float) -> None:
        """`asked_at` and `now` are around the round trip."""
        moved = self._epoch not in ("", answer.epoch)
        self._take_generations(answer)
        if answer.nodes is not None:
            self._take_nodes(answer.nodes, answer.generations, asked_at, moved or self._doubtful)
        self._take_events(answer, moved)
        if answer.statuses is not None:
            self._take_statuses(answer.statuses, answer.now_ms, asked_at, now)
            self._full_at = asked_at
        if answer.sequences is not None and self.caught_up:
            self._take_sequences(answer.sequences)
        self._drop_missing(asked_at)
        self._blind_s = self._blind(asked_at)
        self._asked_at = asked_at
        self._epoch, self._version, self._doubtful = answer.epoch, answer.version, False

    def records(self, now: float) -> tuple[NodeRecord, ...]:
        blind_s = self._blind(now)
        return tuple(known.record(now, blind_s) for _, known in sorted(self._nodes.items()))

    def _blind(self, now: float) -> float:
        """Seconds in which nothing could be heard, up to `now`."""
        if self._asked_at is None:
            return 0.0
        return self._blind_s + max(0.0, now - self._asked_at - self._slack_s)

    # --- who is there ------------------------------------------------------------------------

    def _take_generations(self, answer: Answer) -> None:
        for node_id, latest in answer.generations.items():
            known = self.generations.get(node_id)
            if known is None or latest.number > known:
                self.generations[node_id] = latest.number
                self._seen.pop(node_id, None)
                self._queues.forget(node_id)
        if len(self.generations) > 2 * MAX_GENERATIONS:
            for node_id in self.generations.keys() - answer.generations.keys():
                if node_id not in self._nodes:
                    del self.generations[node_id]
                    self._seen.pop(node_id, None)

    def _take_nodes(
        self,
        nodes: dict[bytes, bytes],
        generations: dict[str, LatestGeneration],
        now: float,
        doubtful: bool,
    ) -> None:
        present = set()
        for key, blob in nodes.items():
            if key.startswith(b"=") and self._take_node(blob, now):
                present.add(key[1:].decode())
        for node_id in self._nodes.keys() - present:
            known = self._nodes[node_id]
            latest = generations.get(node_id)
            left = latest is not None and latest.left and latest.number >= known.generation
            if left or not (doubtful or known.missing_since is not None):
                del self._nodes[node_id]
            elif doubtful:
                known.missing_since = now

    def _take_node(self, blob: bytes, now: float) -> bool:
        registration = decode_registration(blob)
        if registration is None:
            logger.warning("the directory holds a record that this version cannot read")
            return False
        info = registration.info
        if info.generation < self.generations.get(info.node_id, 0):
            return False  # of data that is older than what we have seen
        known = self._nodes.get(info.node_id)
        if known is None or known.generation != info.generation:
            self._nodes[info.node_id] = _Followed(registration, now, self._blind(now))
        else:
            known.registration = registration
            known.missing_since = None
        return True

    def _drop_missing(self, now: float) -> None:
        for node_id, known in list(self._nodes.items()):
            if known.missing_since is not None and now - known.missing_since > RESTORE_GRACE_S:
                del self._nodes[node_id]

    # --- how they are ------------------------------------------------------------------------

    def _take_statuses(
        self, statuses: dict[bytes, bytes], now_ms: int, asked_at: float, now: float
    ) -> None:
        for key, blob in statuses.items():
            written = decode_status(blob)
            known = self._nodes.get(key.decode())
            if known is None or written is None or written.generation != known.generation:
                continue
            if written.beat != known.beat:
                since_written = max(0.0, (now_ms - written.written_at_ms) / 1000)
                if known.beat:  # it is news, whatever the server's clock has done meanwhile
                    since_written = min(since_written, now - self._full_at)
                self._heard(known, written, asked_at - since_written - written.age_ms / 1000)
                known.blind_then = self._blind(asked_at)

    def _heard(self, known: _Followed, written: WrittenStatus, heard_at: float) -> None:
        known.beat = written.beat
        known.heard_at = heard_at
        known.status = written.status

    # --- what they hold ----------------------------------------------------------------------

    def _take_events(self, answer: Answer, moved: bool) -> None:
        if self._cursor == "":  # from now on
            self._cursor = answer.newest
        elif moved or _number(answer.newest) < _number(self._cursor):
            self._cursor = _START
            self.caught_up = False
            return  # what has come so far has come behind the old cursor
        for entry, batches in answer.entries:
            for numbered in batches:
                self._take_batch(numbered)
            self._cursor = entry
        self.caught_up = self._cursor == answer.newest

    def _take_batch(self, numbered: NumberedBatch) -> None:
        batch = numbered.batch
        if self.generations.get(batch.node_id) != numbered.generation:
            return
        seen = self._seen.get(batch.node_id, numbered.base)
        if batch.sequence <= seen:
            return
        if batch.sequence > seen + 1:
            self._queues.put(Gap(batch.node_id, batch.sequence - 1))
        self._queues.put(batch)
        self._seen[batch.node_id] = batch.sequence

    def _take_sequences(self, sequences: dict[bytes, bytes]) -> None:
        for key, blob in sequences.items():
            node_id, span = key.decode(), decode_span(blob)
            if span is None or self.generations.get(node_id) != span.generation:
                continue
            if span.last > self._seen.get(node_id, span.base):
                self._queues.put(Gap(node_id, span.last))
                self._seen[node_id] = span.last


def _pairs(flat: list[bytes] | None) -> dict[bytes, bytes] | None:
    """Of a hash, as the server writes it: key, value, key, value, …"""
    return None if flat is None else dict(zip(flat[::2], flat[1::2], strict=True))


def _number(entry: str) -> tuple[int, int]:
    """Entries of a stream are ordered by this."""
    milliseconds, _, count = entry.partition("-")
    return int(milliseconds), int(count)
