"""What every transport must do, seen by a node that writes and by one that is written to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from kv_transfer import PeerUnreachable
from protocol import HandoffTicket
from tests.kv_transfer.conformance_end import End, EndSpec, Rows
from tests.kv_transfer.pools import LAYOUT
from tests.kv_transfer.remote_end import RemoteEnd, RemoteEnds

TICKET = HandoffTicket("request", 0)
OTHER = HandoffTicket("other", 0)
UNTOUCHED = 0xEE  # what the pool of a receiver is filled with
SIZE = LAYOUT.bytes_per_block
NUM_BLOCKS = 33

E = TypeVar("E", bound=End)
MakeEnd = Callable[[EndSpec], E]


class Pair(NamedTuple):
    """P has random blocks and is connected to D, which is untouched."""

    p: End
    d: End

    def open(self, ticket: HandoffTicket, block_ids: list[int]) -> None:
        self.d.open(ticket, self.p.endpoint(), block_ids)

    def write(self, ticket: HandoffTicket, rows: Rows) -> int:
        return self.p.write(self.d.endpoint(), ticket, rows)


def blocks(*pairs: tuple[int, int]) -> Rows:
    """Whole ones: ours, the peer's."""
    return [(ours * SIZE, theirs * SIZE, SIZE) for ours, theirs in pairs]


def copied(source: bytes, target: bytes, rows: Rows) -> bytes:
    """What the target should look like then."""
    result = bytearray(target)
    for ours, theirs, size in rows:
        result[theirs : theirs + size] = source[ours : ours + size]
    return bytes(result)


class TransportConformance:
    """Inherit from this with a fixture `make_end: MakeEnd`, which closes what it has made.

    A write has to stop at the gates of our blocks (`End.hold`); where a transport has no way to be
    stopped there, set `has_gates = False`.
    """

    has_gates = True

    @pytest.fixture
    def gates(self) -> None:
        if not self.has_gates:
            pytest.skip("its writes cannot be stopped in the middle")

    @pytest.fixture
    def pair(self, make_end: MakeEnd) -> Pair:
        pair = Pair(make_end(EndSpec("p", seed=1)), make_end(EndSpec("d", fill=UNTOUCHED)))
        pair.p.connected(pair.d.endpoint())
        pair.d.connected(pair.p.endpoint())
        return pair

    # ------------------------------------------------------------------ who is there

    def test_nodes_see_each_others_pool(self, make_end: MakeEnd) -> None:
        p = make_end(EndSpec("p"))
        d = make_end(EndSpec("d", num_blocks=7))
        assert p.endpoint() != d.endpoint()
        assert p.connected(p.resolve(d.endpoint())) == d.shape()
        assert d.connected(d.resolve(p.endpoint())) == p.shape()
        d.connect(p.endpoint())  # harmless
        assert d.peer_pool(p.endpoint()) == p.shape()

    def test_endpoints_are_not_used_again(self, make_end: MakeEnd) -> None:
        first = make_end(EndSpec("d"))
        endpoint = first.endpoint()
        first.close()
        assert make_end(EndSpec("d2")).endpoint() != endpoint

    def test_other_schemes_lead_nowhere(self, pair: Pair) -> None:
        for endpoint in ("", "nowhere", "else:where/d", pair.d.endpoint().partition(":")[2]):
            with pytest.raises(PeerUnreachable):
                pair.p.resolve(endpoint)

    def test_nobody_is_at_an_endpoint_whose_node_has_closed(self, make_end: MakeEnd) -> None:
        p, d = make_end(EndSpec("p")), make_end(EndSpec("d", fill=UNTOUCHED))
        endpoint = d.endpoint()
        d.close()
        with pytest.raises(PeerUnreachable):
            p.connected(endpoint)
        peer, error = p.lost()
        assert peer == endpoint
        assert endpoint in error
        with pytest.raises(PeerUnreachable):
            p.notify(endpoint, b"hello")
        assert p.ended(p.write(endpoint, TICKET, blocks((1, 1)))) == "FAILED"
        assert d.read() == bytes([UNTOUCHED]) * (NUM_BLOCKS * SIZE)

    def test_a_peer_that_closes_is_lost_on_both_sides(self, pair: Pair) -> None:
        endpoint = pair.d.endpoint()
        pair.d.close()
        peer, error = pair.p.lost()
        assert peer == endpoint
        assert endpoint in error
        with pytest.raises(PeerUnreachable):
            pair.p.peer_pool(endpoint)
        assert pair.p.ended(pair.write(TICKET, blocks((1, 1)))) == "FAILED"

    # ------------------------------------------------------------------ writes

    @pytest.mark.parametrize(
        "pairs",
        [
            [(1, 1)],
            [(32, 1)],
            [(3, 32)],
            [(n, n) for n in range(1, 33)],
            [(n, 33 - n) for n in range(1, 33)],
            [(1, 7), (2, 8), (3, 9), (9, 30), (11, 10)],
            list(zip(*(random.Random(1).sample(range(1, 33), 20) for _ in "pd"), strict=True)),
        ],
        ids=["one", "last to first", "to last", "all", "reversed", "some merge", "scattered"],
    )
    def test_a_write_copies_its_blocks_and_nothing_else(
        self, pair: Pair, pairs: list[tuple[int, int]]
    ) -> None:
        self.check_write(pair, blocks(*pairs))

    @pytest.mark.parametrize(
        "rows",
        [
            [(SIZE, SIZE, 1)],
            [(2 * SIZE - 1, 3 * SIZE - 1, 1)],
            [(SIZE + 13, 2 * SIZE + 7, 101)],
            [(n * SIZE + 128, n * SIZE + 128, 64) for n in range(1, 33)],
            [(SIZE + n * 64, 9 * SIZE - (n + 1) * 64, 64) for n in range(8)],
            [(5 * SIZE + n * 32, (6 + n) * SIZE + 32, 32) for n in range(16)],
        ],
        ids=["first byte", "last byte", "odd", "a layer of all", "rows turned", "one to many"],
    )
    def test_parts_of_blocks(self, pair: Pair, rows: Rows) -> None:
        self.check_write(pair, rows)

    def test_random_extents(self, pair: Pair) -> None:
        chance = random.Random(2)
        for _ in range(5):
            rows = []
            for theirs in chance.sample(range(1, 33), 12):
                size = chance.randint(1, SIZE)
                ours = chance.randrange(1, 33) * SIZE + chance.randint(0, SIZE - size)
                rows.append((ours, theirs * SIZE + chance.randint(0, SIZE - size), size))
            self.check_write(pair, rows)

    def check_write(self, pair: Pair, rows: Rows) -> None:
        source, target = pair.p.read(), pair.d.read()
        pair.open(TICKET, sorted({theirs // SIZE for _, theirs, _ in rows}))
        assert pair.p.ended(pair.write(TICKET, rows)) == "DONE"
        assert pair.d.read() == copied(source, target, rows)
        assert pair.p.read() == source

    def test_nothing_to_write(self, pair: Pair) -> None:
        self.check_write(pair, [])

    def test_pools_of_different_sizes(self, make_end: MakeEnd) -> None:
        p = make_end(EndSpec("p", seed=3, num_blocks=5))
        d = make_end(EndSpec("d", fill=UNTOUCHED, num_blocks=65))
        p.connected(d.endpoint())
        d.connected(p.endpoint())
        self.check_write(Pair(p, d), blocks((4, 64), (1, 33)))
        d.fill(5)
        self.check_write(Pair(d, p), blocks((64, 4), (33, 1)))

    @pytest.mark.parametrize(
        "row",
        [
            (1 * SIZE, 33 * SIZE, SIZE),
            (33 * SIZE, 1 * SIZE, SIZE),
            (1 * SIZE, 32 * SIZE + 1, SIZE),
            (-SIZE, SIZE, SIZE),
            (SIZE, -SIZE, SIZE),
            (SIZE, SIZE, -1),
            (SIZE, (1 << 62), SIZE),
        ],
        ids=["theirs", "ours", "by a byte", "ours negative", "negative", "size", "far"],
    )
    def test_nothing_outside_the_pools_is_touched(
        self, pair: Pair, row: tuple[int, int, int]
    ) -> None:
        before = pair.d.read()
        pair.open(TICKET, list(range(1, 33)))
        write = pair.write(TICKET, [*blocks((1, 1)), row])
        assert pair.p.ended(write) == "FAILED"
        assert pair.d.read() == before
        assert pair.p.ended(pair.write(TICKET, blocks((1, 1)))) == "DONE"

    def test_several_writes_under_one_ticket(self, pair: Pair) -> None:
        pair.open(TICKET, list(range(1, 11)))
        before = pair.d.read()
        rows = blocks(*((n, n) for n in range(1, 11)))
        writes = [pair.write(TICKET, rows[n : n + 2]) for n in range(0, 10, 2)]
        assert [pair.p.ended(write) for write in writes] == ["DONE"] * 5
        assert pair.d.read() == copied(pair.p.read(), before, rows)

    def test_many_writers_and_both_directions_at_once(self, pair: Pair, make_end: MakeEnd) -> None:
        p, d = pair
        other = make_end(EndSpec("p2", seed=7))
        other.connected(d.endpoint())
        back = HandoffTicket("back", 3)
        pair.open(TICKET, list(range(1, 17)))
        d.open(OTHER, other.endpoint(), list(range(17, 33)))
        p.open(back, d.endpoint(), list(range(17, 33)))
        low = blocks(*((n, n) for n in range(1, 17)))
        high = blocks(*((n, n) for n in range(17, 33)))
        mine, others, before = p.read(), other.read(), d.read()
        writes = [
            (p, pair.write(TICKET, low)),
            (other, other.write(d.endpoint(), OTHER, high)),
            (d, d.write(p.endpoint(), back, [(SIZE, 20 * SIZE, 0), (0, 17 * SIZE, SIZE)])),
        ]
        assert [end.ended(write) for end, write in writes] == ["DONE"] * 3
        assert d.read() == copied(others, copied(mine, before, low), high)
        assert p.read() == copied(before, mine, [(0, 17 * SIZE, SIZE)])

    def test_a_dead_peer_is_in_nobody_elses_way(self, pair: Pair, make_end: MakeEnd) -> None:
        dead = make_end(EndSpec("dead"))
        pair.p.connected(dead.endpoint())
        dead.close()
        pair.p.lost()
        pair.open(TICKET, [1])
        writes = [
            pair.p.write(dead.endpoint(), OTHER, blocks((1, 1))),
            pair.write(TICKET, blocks((1, 1))),
        ]
        assert [pair.p.ended(write) for write in writes] == ["FAILED", "DONE"]

    # ------------------------------------------------------------------ fences

    def test_what_was_never_opened_is_fenced(self, pair: Pair) -> None:
        assert pair.d.fence(TICKET)
        pair.open(OTHER, [1])
        assert pair.d.fence(TICKET)
        assert pair.p.fence(OTHER)  # opened at the other end

    def test_what_nobody_can_know_of_is_fenced(self, make_end: MakeEnd) -> None:
        p, d = make_end(EndSpec("p")), make_end(EndSpec("d"))
        endpoint = p.endpoint()
        p.close()
        d.open(TICKET, endpoint, [1])
        with pytest.raises(PeerUnreachable):
            d.connected(endpoint)
        d.fenced(TICKET)

    @pytest.mark.usefixtures("gates")
    def test_a_fence_is_no_proof_while_a_write_runs(self, pair: Pair) -> None:
        pair.p.hold(2)
        pair.open(TICKET, [1, 2, 3])
        write = pair.write(TICKET, blocks((1, 1), (2, 2), (3, 3)))
        pair.p.held(2)
        assert pair.p.state(write) == "PENDING"
        assert not pair.d.fence(TICKET)
        assert not pair.d.fence(TICKET)
        pair.p.release(2)
        assert pair.p.ended(write) == "DONE"

    # ------------------------------------------------------------------ messages

    def test_messages_arrive_whole_once_and_in_order(self, pair: Pair) -> None:
        messages = [bytes([n % 256]) * (n % 50) + n.to_bytes(4, "big") for n in range(2000)]
        pair.p.notify_all(pair.d.endpoint(), messages)
        received = pair.d.received(len(messages))
        assert [message.data for message in received] == messages
        assert {message.peer for message in received} == {pair.p.endpoint()}
        assert pair.d.receive() == []
        assert pair.p.receive() == []

    @pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 1 << 20])
    def test_messages_of_all_sizes(self, pair: Pair, size: int) -> None:
        message = random.Random(size).randbytes(size)
        pair.p.notify_all(pair.d.endpoint(), [message, b"end"])
        assert [received.data for received in pair.d.received(2)] == [message, b"end"]

    def test_a_message_too_long_is_refused(self, pair: Pair) -> None:
        with pytest.raises(PeerUnreachable, match="bytes"):
            pair.p.notify(pair.d.endpoint(), bytes((1 << 20) + 1000))
        pair.p.notify(pair.d.endpoint(), b"fine")
        assert [received.data for received in pair.d.received(1)] == [b"fine"]

    def test_a_message_connects(self, make_end: MakeEnd) -> None:
        p, d = make_end(EndSpec("p")), make_end(EndSpec("d"))
        p.notify_all(d.endpoint(), [b"first", b"second"])
        assert [received.data for received in d.received(2)] == [b"first", b"second"]

    def test_messages_cross(self, pair: Pair) -> None:
        p, d = pair
        for n in range(50):
            p.notify(d.endpoint(), b"p%d" % n)
            d.notify(p.endpoint(), b"d%d" % n)
        assert [received.data for received in d.received(50)] == [b"p%d" % n for n in range(50)]
        assert [received.data for received in p.received(50)] == [b"d%d" % n for n in range(50)]

    @pytest.mark.usefixtures("gates")
    def test_messages_while_a_write_runs(self, pair: Pair) -> None:
        p, d = pair
        p.hold(1)
        pair.open(TICKET, [1])
        write = pair.write(TICKET, blocks((1, 1)))
        p.held(1)
        p.notify(d.endpoint(), b"alive")
        assert [received.data for received in d.received(1)] == [b"alive"]
        d.notify(p.endpoint(), b"stop")
        assert [received.data for received in p.received(1)] == [b"stop"]
        p.release(1)
        assert p.ended(write) == "DONE"

    def test_what_was_written_is_there_when_a_later_message_is(self, pair: Pair) -> None:
        p, d = pair
        pair.open(TICKET, list(range(1, 33)))
        source, expected = p.read(), d.read()
        for n in range(1, 33):
            rows = blocks((n, n))
            assert p.ended(pair.write(TICKET, rows)) == "DONE"
            p.notify(d.endpoint(), b"done")
            assert [received.data for received in d.received(1)] == [b"done"]
            expected = copied(source, expected, rows)
            assert d.read() == expected

    # ------------------------------------------------------------------ the end

    @pytest.mark.usefixtures("gates")
    def test_close_waits_for_what_is_being_written(self, pair: Pair) -> None:
        p, d = pair
        p.hold(2)
        pair.open(TICKET, [1, 2, 3])
        write = pair.write(TICKET, blocks((1, 1), (2, 2), (3, 3)))
        behind = pair.write(TICKET, blocks((4, 1)))
        p.held(2)
        p.begin_close()
        assert not p.closed(0.05)
        assert p.state(write) == "PENDING"
        p.release(2)
        assert p.closed(10)
        assert p.state(write) != "PENDING"
        assert p.state(behind) == "FAILED"
        after = d.read()
        p.fill(1)
        assert d.read() == after

    def test_last_words_arrive(self, pair: Pair) -> None:
        p, d = pair
        p.notify(d.endpoint(), b"farewell")
        endpoint = p.endpoint()
        p.close()
        assert [received.data for received in d.received(1)] == [b"farewell"]
        assert d.lost()[0] == endpoint

    def test_close_with_messages_unread(self, pair: Pair) -> None:
        pair.p.notify_all(pair.d.endpoint(), [b"unread"] * 100)
        pair.d.close()

    def test_close_twice(self, pair: Pair) -> None:
        pair.p.close()
        pair.p.close()
        assert pair.p.ended(pair.write(TICKET, blocks((1, 1)))) == "FAILED"
        with pytest.raises(PeerUnreachable):
            pair.p.notify(pair.d.endpoint(), b"")


class ExactFences(TransportConformance):
    """For a transport whose target refuses what it has not allowed, and knows what still runs."""

    @pytest.mark.parametrize(
        ("ticket", "rows"),
        [
            (OTHER, blocks((1, 1))),
            (HandoffTicket("request", 1), blocks((1, 1))),
            (TICKET, blocks((1, 3))),
            (TICKET, blocks((1, 1), (2, 2), (3, 3))),
            (TICKET, blocks((1, 0))),
            (TICKET, [(SIZE, SIZE + 1, SIZE)]),
            (TICKET, [(SIZE, SIZE, 3 * SIZE)]),
        ],
        ids=["ticket", "generation", "block", "last of several", "null", "crosses", "spans"],
    )
    def test_what_was_not_opened_is_refused(
        self, pair: Pair, ticket: HandoffTicket, rows: Rows
    ) -> None:
        before = pair.d.read()
        pair.open(TICKET, [1, 2])
        assert pair.p.ended(pair.write(ticket, rows)) == "FAILED"
        assert pair.d.read() == before
        assert pair.p.ended(pair.write(TICKET, blocks((1, 1), (2, 2)))) == "DONE"

    def test_a_ticket_is_for_the_peer_that_it_was_opened_for(
        self, pair: Pair, make_end: MakeEnd
    ) -> None:
        other = make_end(EndSpec("p2"))
        other.connected(pair.d.endpoint())
        pair.open(TICKET, [1])
        write = other.write(pair.d.endpoint(), TICKET, blocks((1, 1)))
        assert other.ended(write) == "FAILED"

    def test_nothing_lands_after_a_fence(self, pair: Pair) -> None:
        before = pair.d.read()
        pair.open(TICKET, [1])
        pair.open(OTHER, [2])
        pair.d.fenced(TICKET)
        assert pair.p.ended(pair.write(TICKET, blocks((1, 1)))) == "FAILED"
        assert pair.p.ended(pair.write(OTHER, blocks((2, 2)))) == "DONE"
        assert pair.d.read() == copied(pair.p.read(), before, blocks((2, 2)))
        assert pair.d.fence(TICKET)

    @pytest.mark.usefixtures("gates")
    def test_a_fence_waits_for_the_running_write(self, pair: Pair) -> None:
        pair.p.hold(2)
        pair.open(TICKET, [1, 2, 3])
        write = pair.write(TICKET, blocks((1, 1), (2, 2), (3, 3)))
        pair.p.held(2)
        assert not pair.d.fence(TICKET)
        assert pair.d.fence(OTHER)
        pair.p.release(2)
        pair.d.fenced(TICKET)
        pair.d.fill(UNTOUCHED)  # somebody else's from now on
        pair.p.ended(write)
        assert pair.p.ended(pair.write(TICKET, blocks((1, 1)))) == "FAILED"
        assert pair.d.read() == bytes([UNTOUCHED]) * (NUM_BLOCKS * SIZE)

    @pytest.mark.usefixtures("gates")
    def test_a_fence_holds_for_writes_that_wait_behind_others(self, pair: Pair) -> None:
        before = pair.d.read()
        pair.p.hold(1)
        pair.open(TICKET, [1])
        pair.open(OTHER, [2])
        first = pair.write(TICKET, blocks((1, 1)))
        second = pair.write(OTHER, blocks((2, 2)))
        pair.p.held(1)
        assert pair.d.fence(OTHER)
        pair.p.release(1)
        assert pair.p.ended(first) == "DONE"
        assert pair.p.ended(second) == "FAILED"
        assert pair.d.read() == copied(pair.p.read(), before, blocks((1, 1)))

    @pytest.mark.usefixtures("gates")
    def test_the_target_closes_when_nobody_writes_to_it(self, pair: Pair) -> None:
        pair.p.hold(2)
        pair.open(TICKET, [1, 2])
        write = pair.write(TICKET, blocks((1, 1), (2, 2)))
        pair.p.held(2)
        pair.d.begin_close()
        assert not pair.d.closed(0.05)
        pair.p.release(2)
        assert pair.d.closed(10)
        pair.d.fill(1)
        pair.p.ended(write)
        assert set(pair.d.read()) == {1}


class ProcessConformance(TransportConformance):
    """For a transport between processes. Set `factory` to `module:function`, a `MakeParts`.

    The module is imported by a child process; `module` needs nothing of pytest.
    """

    factory: str

    @pytest.fixture(scope="class")
    @classmethod
    def remote_ends(cls) -> Iterator[RemoteEnds]:
        ends = RemoteEnds(cls.factory)
        yield ends
        ends.discard_all()

    @pytest.fixture
    def make_end(self, remote_ends: RemoteEnds) -> Iterator[MakeEnd[RemoteEnd]]:
        yield remote_ends.make
        assert remote_ends.finish_all() == []

    @pytest.fixture
    def p(self, pair: Pair) -> RemoteEnd:
        assert isinstance(pair.p, RemoteEnd)
        return pair.p

    @pytest.fixture
    def d(self, pair: Pair) -> RemoteEnd:
        assert isinstance(pair.d, RemoteEnd)
        return pair.d

    @pytest.mark.parametrize("who", ["p", "d"])
    def test_a_killed_peer_is_lost(self, pair: Pair, p: RemoteEnd, d: RemoteEnd, who: str) -> None:
        killed, other = (p, d) if who == "p" else (d, p)
        endpoint = killed.endpoint()
        killed.kill()
        peer, error = other.lost()
        assert peer == endpoint
        assert endpoint in error
        with pytest.raises(PeerUnreachable):
            other.peer_pool(endpoint)
        with pytest.raises(PeerUnreachable):
            other.notify(endpoint, b"hello")
        assert other.ended(other.write(endpoint, TICKET, blocks((1, 1)))) == "FAILED"

    def test_the_death_of_the_writer_is_a_fence(self, pair: Pair, p: RemoteEnd) -> None:
        pair.open(TICKET, [1])
        assert pair.p.ended(pair.write(TICKET, blocks((1, 1)))) == "DONE"
        assert not pair.d.fence(TICKET)
        p.kill()
        pair.d.fenced(TICKET)
        assert pair.d.fence(TICKET)

    @pytest.mark.usefixtures("gates")
    def test_killed_in_the_middle_of_a_write(self, pair: Pair, p: RemoteEnd) -> None:
        source, before = p.read(), pair.d.read()
        p.hold(2)
        pair.open(TICKET, [1, 2, 3])
        pair.write(TICKET, blocks((1, 1), (2, 2), (3, 3)))
        p.held(2)
        assert not pair.d.fence(TICKET)
        p.kill()
        pair.d.fenced(TICKET)
        landed = pair.d.read()
        assert landed == copied(source, before, blocks((1, 1)))
        pair.d.fill(UNTOUCHED)
        assert set(pair.d.read()) == {UNTOUCHED}

    @pytest.mark.usefixtures("gates")
    def test_a_stopped_writer_is_no_fence(self, pair: Pair, p: RemoteEnd) -> None:
        source, before = p.read(), pair.d.read()
        p.hold(2)
        pair.open(TICKET, [1, 2])
        write = pair.write(TICKET, blocks((1, 1), (2, 2)))
        p.held(2)
        p.stop()
        assert not pair.d.fence(TICKET)
        p.go_on()
        assert not pair.d.fence(TICKET)
        p.release(2)
        assert p.ended(write) == "DONE"
        assert pair.d.read() == copied(source, before, blocks((1, 1), (2, 2)))

    def test_a_closed_connection_is_no_fence(self, pair: Pair, p: RemoteEnd) -> None:
        """The process still runs, and who knows what it does. Once it has ended, it is known."""
        pair.open(TICKET, [1])
        pair.p.close()
        pair.d.lost()
        assert not pair.d.fence(TICKET)
        p.kill()
        pair.d.fenced(TICKET)

    @pytest.mark.usefixtures("gates")
    def test_the_target_dies_in_the_middle_of_a_write(self, pair: Pair, d: RemoteEnd) -> None:
        pair.p.hold(2)
        pair.open(TICKET, [1, 2])
        write = pair.write(TICKET, blocks((1, 1), (2, 2)))
        pair.p.held(2)
        d.kill()
        pair.p.lost()
        pair.p.release(2)
        assert pair.p.ended(write) == "FAILED"

    def test_messages_to_a_stopped_peer_arrive_when_it_goes_on(
        self, pair: Pair, d: RemoteEnd
    ) -> None:
        messages = [b"%d" % n + bytes(10_000) for n in range(300)]
        endpoint = d.endpoint()
        d.stop()
        pair.p.notify_all(endpoint, messages)
        d.go_on()
        assert [received.data for received in d.received(len(messages))] == messages

    def test_a_killed_node_leaves_nothing(self, pair: Pair, p: RemoteEnd, d: RemoteEnd) -> None:
        names = [end.endpoint().rpartition("/")[2] for end in pair]
        pair.open(TICKET, [1])
        assert pair.p.ended(pair.write(TICKET, blocks((1, 1)))) == "DONE"
        p.kill()
        d.kill()
        for directory in map(Path, ("/dev/shm", "/tmp")):  # folders are those of other tests
            assert not [path for path in directory.glob("*kvrelay*") if not path.is_dir()]
        sockets = Path("/proc/net/unix").read_text()
        assert not [name for name in names if name in sockets]

    def test_a_restarted_node_is_another(self, pair: Pair, d: RemoteEnd, make_end: MakeEnd) -> None:
        old = d.endpoint()
        d.kill()
        pair.p.lost()
        again = make_end(EndSpec("d", fill=UNTOUCHED))
        assert again.endpoint() != old
        pair.p.connected(again.endpoint())
        again.open(TICKET, pair.p.endpoint(), [1])
        write = pair.p.write(again.endpoint(), TICKET, blocks((1, 1)))
        assert pair.p.ended(write) == "DONE"
        with pytest.raises(PeerUnreachable):
            pair.p.peer_pool(old)

    def test_an_idle_node_rests(self, pair: Pair) -> None:
        """Both were busy just now; then nothing happens for a second."""
        self.check_write(pair, blocks((1, 1)))
        pair.p.notify(pair.d.endpoint(), b"hello")
        pair.d.received(1)
        before = [end.cpu_s() for end in pair]
        time.sleep(1)
        used = [end.cpu_s() - cpu_s for end, cpu_s in zip(pair, before, strict=True)]
        assert max(used) < 0.01
