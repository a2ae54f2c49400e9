"""Every fault does what its name says, to what it is meant for, and to nothing else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_transfer import (
    Fault,
    FaultKind,
    FaultPlan,
    FaultyTransport,
    MemoryHub,
    MemoryTransport,
    PeerUnreachable,
)
from kv_transfer.wire import Commit, Heartbeat, Message, PrefillStarted, Pushing, decode, encode
from protocol import ConfigError, HandoffTicket
from tests.kv_transfer.conformance_end import EndSpec, LocalEnd, Parts, usage
from tests.kv_transfer.pools import make_pool
from tests.kv_transfer.transport_conformance import (
    OTHER,
    SIZE,
    TICKET,
    UNTOUCHED,
    ExactFences,
    MakeEnd,
    ProcessConformance,
    blocks,
)

Ends = tuple[LocalEnd, LocalEnd]
MakeEnds = Callable[..., Ends]

STARTED, PUSHING, BEAT = PrefillStarted(TICKET), Pushing(TICKET), Heartbeat(TICKET)
COMMIT = Commit(TICKET, 1, (1,), ())


def make_parts(hub: MemoryHub, plan: FaultPlan, spec: EndSpec) -> Parts:
    pool = make_pool(spec.num_blocks, spec.layout)
    inner = MemoryTransport(hub, spec.name, copy=pool.copy_extents)
    return Parts(FaultyTransport(inner, plan, spec.name), pool)


@pytest.fixture
def make_end_with() -> Iterator[Callable[[FaultPlan], MakeEnd[LocalEnd]]]:
    hub, before, made = MemoryHub(), usage(), []

    def make_with(plan: FaultPlan) -> MakeEnd[LocalEnd]:
        def make(spec: EndSpec) -> LocalEnd:
            made.append(LocalEnd(lambda spec: make_parts(hub, plan, spec), spec))
            return made[-1]

        return make

    yield make_with
    for end in made:
        end.close()
    after = usage()
    assert (after.threads, after.descriptors) == (before.threads, before.descriptors)


class TestWithAnEmptyPlan(ExactFences):
    @pytest.fixture
    def make_end(
        self, make_end_with: Callable[[FaultPlan], MakeEnd[LocalEnd]]
    ) -> MakeEnd[LocalEnd]:
        return make_end_with(FaultPlan())


class TestWithAnEmptyPlanBetweenProcesses(ProcessConformance):
    factory = "tests.kv_transfer.faulty_end:make_parts"


class TestWithAPlanForOthers(ExactFences):
    """Faults that concern no node and no hand-off here."""

    @pytest.fixture
    def make_end(
        self, make_end_with: Callable[[FaultPlan], MakeEnd[LocalEnd]]
    ) -> MakeEnd[LocalEnd]:
        faults = [Fault(kind=kind, ticket="else/*") for kind in FaultKind]
        return make_end_with(FaultPlan(faults=(*faults, Fault(kind=FaultKind.CUT, node="x"))))


@pytest.fixture
def ends(make_end_with: Callable[[FaultPlan], MakeEnd[LocalEnd]]) -> MakeEnds:
    """P, whose pool is random, and D, which is untouched; faults befall what P does."""

    def make(*faults: Fault, **plan: object) -> Ends:
        make_end = make_end_with(FaultPlan(faults=faults, **plan))  # type: ignore[arg-type]
        p, d = make_end(EndSpec("p", seed=1)), make_end(EndSpec("d", fill=UNTOUCHED))
        p.connected(d.endpoint())
        return p, d

    return make


def send(p: LocalEnd, d: LocalEnd, *messages: Message) -> None:
    p.notify_all(d.endpoint(), [encode(message) for message in messages])


def taken(d: LocalEnd, count: int) -> list[Message]:
    """At least so many messages, and no more have come."""
    return [decode(received.data) for received in d.received(count)] if count else []


def write(p: LocalEnd, d: LocalEnd, ticket: HandoffTicket = TICKET) -> int:
    d.open(ticket, p.endpoint(), [1, 2])
    return p.write(d.endpoint(), ticket, blocks((5, 1), (6, 2)))


def has_arrived(p: LocalEnd, d: LocalEnd) -> bool:
    return d.read()[SIZE : 3 * SIZE] == p.read()[5 * SIZE : 7 * SIZE]


class TestMessages:
    def test_one_is_lost(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.DROP, of=("pushing",)))
        send(p, d, STARTED, PUSHING, COMMIT)
        assert taken(d, 2) == [STARTED, COMMIT]

    def test_one_comes_twice(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.DUPLICATE, of=("commit",)))
        send(p, d, STARTED, COMMIT)
        assert taken(d, 3) == [STARTED, COMMIT, COMMIT]

    def test_one_is_overtaken_by_the_next(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.REORDER, of=("started",)))
        send(p, d, STARTED, PUSHING, COMMIT)
        assert taken(d, 3) == [PUSHING, STARTED, COMMIT]

    def test_one_that_nothing_overtakes_comes_all_the_same(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.REORDER, of=("commit",), seconds=0.01))
        send(p, d, COMMIT)
        assert d.receive() == []
        p._until(lambda: p.receive() == [] and bool(found := taken_now(d)) and found == [COMMIT])

    def test_a_late_one_keeps_back_those_behind_it(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.DELAY, of=("pushing",), seconds=0.05))
        begin = time.monotonic()
        send(p, d, STARTED, PUSHING, COMMIT)
        assert taken(d, 1) == [STARTED]
        found: list[Message] = []

        def all_there() -> bool:
            p.receive()  # a node polls, and what was held back goes on
            found.extend(taken_now(d))
            return len(found) == 2

        p._until(all_there)
        assert found == [PUSHING, COMMIT]
        assert time.monotonic() - begin >= 0.05

    def test_a_gate_holds_until_its_last_writer_is_gone(
        self, ends: MakeEnds, tmp_path: Path
    ) -> None:
        path = tmp_path / "gate"
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR)
        p, d = ends(Fault(kind=FaultKind.DELAY, of=("commit",), gate=str(path)))
        send(p, d, COMMIT, BEAT)
        assert p.receive() == d.receive() == []
        path.unlink()
        os.close(writer)
        found: list[Message] = []

        def all_there() -> bool:
            p.receive()
            found.extend(taken_now(d))
            return len(found) == 2

        p._until(all_there)
        send(p, d, COMMIT)  # without its FIFO a gate is open
        assert taken(d, 1) == [COMMIT]

    @pytest.mark.parametrize(
        ("limits", "arrive"),
        [
            ({"after": 2}, 2),
            ({"times": 3}, 7),
            ({"after": 1, "times": 2}, 8),
            ({"probability": 0.0}, 10),
            ({"ticket": "request/1"}, 10),
            ({"ticket": "req*/0"}, 0),
            ({"node": "d"}, 10),
            ({"node": "?"}, 0),
        ],
        ids=str,
    )
    def test_only_those_that_are_meant(
        self, ends: MakeEnds, limits: dict[str, object], arrive: int
    ) -> None:
        p, d = ends(Fault(kind=FaultKind.DROP, **limits))  # type: ignore[arg-type]
        send(p, d, *[BEAT] * 10)
        assert len(taken(d, arrive)) == arrive
        assert d.receive() == []

    def test_the_same_seed_does_the_same(
        self, make_end_with: Callable[[FaultPlan], MakeEnd[LocalEnd]], tmp_path: Path
    ) -> None:
        hits = []
        for run, seed in enumerate((1, 1, 2)):
            journal = tmp_path / str(run)
            fault = Fault(kind=FaultKind.DUPLICATE, probability=0.5)
            make_end = make_end_with(FaultPlan(seed=seed, faults=(fault,), journal=str(journal)))
            p, d = make_end(EndSpec("p")), make_end(EndSpec("d"))
            tickets = [HandoffTicket("r", n) for n in range(100)]
            send(p, d, *map(Heartbeat, tickets))
            p.close()
            d.close()
            hits.append(journal.read_text())
        assert hits[0] == hits[1] != hits[2]
        assert 20 < len(hits[0].splitlines()) < 80
        assert '"kind": "duplicate", "of": "heartbeat", "ticket": "r/' in hits[0]


def taken_now(d: LocalEnd) -> list[Message]:
    return [decode(received.data) for received in d.receive()]


class TestWrites:
    def test_a_late_one_starts_late(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.DELAY, of=("write",), seconds=0.05))
        begin = time.monotonic()
        number = write(p, d)
        assert p.receive() == []
        assert p.state(number) == "PENDING"
        assert set(d.read()) == {UNTOUCHED}
        assert polled(p, number) == "DONE"
        assert time.monotonic() - begin >= 0.05
        assert has_arrived(p, d)

    def test_a_stalled_one_arrives_but_does_not_end(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.STALL, times=1))
        first = write(p, d)
        second = write(p, d, OTHER)
        assert p.ended(second) == "DONE"  # behind the first, which has ended inside
        assert has_arrived(p, d)
        assert p.state(first) == "PENDING"
        p.close()
        assert p.state(first) == "DONE"

    def test_one_that_is_not_started_by_the_end_never_is(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.DELAY, of=("write",)))
        number = write(p, d)
        p.close()
        assert p.state(number) == "FAILED"
        assert set(d.read()) == {UNTOUCHED}

    def test_one_block_gets_wrong_bytes(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.CORRUPT))
        ours = p.read()
        assert p.ended(write(p, d)) == "DONE"
        right = [d.read()[n * SIZE :][:SIZE] == ours[(n + 4) * SIZE :][:SIZE] for n in (1, 2)]
        assert sorted(right) == [False, True]
        assert d.read()[3 * SIZE :] == bytes([UNTOUCHED]) * (30 * SIZE)
        assert p.read() == ours

    def test_what_is_opened_may_hold_anything(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.CORRUPT, of=("open",), node="d"))
        d.open(TICKET, p.endpoint(), [3, 4])
        changed = [n for n in range(33) if set(d.read()[n * SIZE :][:SIZE]) != {UNTOUCHED}]
        assert len(changed) == 1
        assert changed[0] in (3, 4)

    def test_a_slow_link_takes_its_time_for_all_together(self, ends: MakeEnds) -> None:
        p, d = ends(bytes_per_s=40 * SIZE)
        begin = time.monotonic()
        numbers = [write(p, d), write(p, d, OTHER)]
        assert [polled(p, number) for number in numbers] == ["DONE", "DONE"]
        assert 0.1 <= time.monotonic() - begin < 0.5  # four blocks


def polled(p: LocalEnd, number: int) -> str:
    """As `ended`, by a node that polls whenever it is told."""

    def has_ended() -> bool:
        p.receive()
        return p.state(number) != "PENDING"

    p._until(has_ended)
    return p.state(number)


class TestACut:
    def test_nothing_passes_until_it_is_over(self, ends: MakeEnds, tmp_path: Path) -> None:
        path = tmp_path / "gate"
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR)
        p, d = ends(Fault(kind=FaultKind.CUT, of=("pushing",), node="p", gate=str(path), times=1))
        send(p, d, STARTED, PUSHING)
        assert taken(d, 2) == [STARTED, PUSHING]
        assert p.lost()[0] == d.endpoint()
        with pytest.raises(PeerUnreachable, match="injected"):
            send(p, d, BEAT)
        with pytest.raises(PeerUnreachable, match="injected"):
            p.peer_pool(d.endpoint())
        assert p.ended(write(p, d)) == "FAILED"
        p.connect(d.endpoint())
        assert p.lost()[0] == d.endpoint()
        d.notify(p.endpoint(), b"into the void")
        assert p.receive() == []
        path.unlink()
        os.close(writer)
        p._until(lambda: is_reachable(p, d))
        send(p, d, COMMIT)
        assert taken(d, 1) == [COMMIT]
        assert p.ended(write(p, d)) == "DONE"

    def test_it_may_come_with_what_is_taken_in(self, ends: MakeEnds) -> None:
        p, d = ends(Fault(kind=FaultKind.CUT, of=("pushing",), node="d"))
        send(p, d, STARTED)
        assert taken(d, 1) == [STARTED]
        send(p, d, PUSHING, COMMIT)
        assert d.receive() == []
        assert d.lost()[0] == p.endpoint()


def is_reachable(p: LocalEnd, d: LocalEnd) -> bool:
    try:
        return p.peer_pool(d.endpoint()) is not None
    except PeerUnreachable:
        return False


def test_nothing_runs_while_nothing_is_held_back(ends: MakeEnds) -> None:
    p, d = ends(Fault(kind=FaultKind.DROP, of=("commit",)))
    threads = set(threading.enumerate())
    send(p, d, STARTED, COMMIT, PUSHING)
    assert taken(d, 2) == [STARTED, PUSHING]
    assert set(threading.enumerate()) == threads


def test_what_is_held_back_costs_no_time(ends: MakeEnds) -> None:
    p, d = ends(Fault(kind=FaultKind.DELAY, of=("commit",), seconds=0.4))
    send(p, d, COMMIT)
    begin = time.process_time()
    p._until(lambda: p.receive() == [] and taken_now(d) == [COMMIT])
    assert time.process_time() - begin < 0.1


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"faults": [{"kind": "drop", "of": ["write"]}]}, "of: drop can befall .*, not 'write'"),
        ({"faults": [{"kind": "stall", "of": ["commit"]}]}, "stall can befall write"),
        ({"faults": [{"kind": "burn"}]}, "burn"),
        ({"faults": [{"kind": "drop", "probability": 1.5}]}, "probability: must be from 0 to 1"),
        ({"faults": [{"kind": "drop", "probability": float("nan")}]}, "probability"),
        ({"faults": [{"kind": "delay", "seconds": -1}]}, "seconds: must be at least 0"),
        ({"faults": [{"kind": "drop", "often": True}]}, "often"),
        ({"bytes_per_s": 0}, "bytes_per_s: must be above 0"),
        ({"speed": 1}, "speed"),
        ({"faults": [{}]}, "kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_plan_is_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        FaultPlan.parse(values)
    assert caught.value.field == "faults"
