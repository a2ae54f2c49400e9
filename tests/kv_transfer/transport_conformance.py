"""What every transport must do, seen by a node that writes and by one that is written to."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash

from kv_transfer import PeerUnreachable, Transport, Write, WriteState
from protocol import HandoffTicket
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, GatedPool, make_pool, make_random_pool

TICKET = HandoffTicket("request", 0)
OTHER = HandoffTicket("other", 0)
UNTOUCHED = 0xEE  # what the pool of a receiver is filled with

MakeTransport = Callable[[str], Transport]


@dataclass
class End:
    """One node's transport with its pool. `activity` is set by `on_activity` and nothing else."""

    transport: Transport
    pool: GatedPool
    activity: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.transport.register(self.pool, self.activity.set)

    @property
    def endpoint(self) -> str:
        return self.transport.endpoint

    def until(self, condition: Callable[[], bool]) -> None:
        """Look only when told that it is worth while, as a node does."""
        while True:
            self.activity.clear()
            if condition():
                return
            assert self.activity.wait(TIMEOUT_S), "nothing happened, or nobody told"

    def write(self, peer: End, ticket: HandoffTicket, pairs: Sequence[tuple[int, int]]) -> Write:
        return self.transport.write(peer.endpoint, ticket, pairs)

    def ended(self, write: Write) -> WriteState:
        """The state in which the write has ended."""
        self.until(lambda: write.state is not WriteState.PENDING)
        return write.state

    def received(self, count: int) -> list[bytes]:
        messages: list[bytes] = []

        def enough() -> bool:
            messages.extend(self.transport.receive())
            return len(messages) >= count

        self.until(enough)
        return messages


class TransportConformance:
    """Inherit from this, with a fixture `make_transport`: a fresh transport by its name.

    Pools hand out the address of a block only if its gate is open, which is how a write is stopped
    in the middle. A transport that asks for no addresses while it writes needs gates of its own.
    """

    @pytest.fixture(autouse=True)
    def nothing_is_left(self) -> Iterator[None]:
        threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        yield
        assert set(threading.enumerate()) == threads
        assert len(os.listdir("/proc/self/fd")) == descriptors

    @pytest.fixture
    def ends(
        self, nothing_is_left: None, make_transport: MakeTransport
    ) -> Iterator[tuple[End, End]]:
        """P, with random blocks, and D, untouched."""
        p = End(make_transport("p"), make_random_pool(seed=0))
        d = End(make_transport("d"), make_pool(fill=UNTOUCHED))
        yield p, d
        p.transport.close()
        d.transport.close()

    # ------------------------------------------------------------------ who is there

    def test_nodes_see_each_others_layout(self, ends: tuple[End, End]) -> None:
        p, d = ends
        assert p.endpoint != d.endpoint
        assert p.transport.peer_layout(d.endpoint) == LAYOUT
        assert d.transport.peer_layout(p.endpoint) == LAYOUT

    def test_nobody_is_at_an_unknown_endpoint(self, ends: tuple[End, End]) -> None:
        p, d = ends
        d.transport.close()
        with pytest.raises(PeerUnreachable):
            p.transport.peer_layout(d.endpoint)
        with pytest.raises(PeerUnreachable):
            p.transport.notify(d.endpoint, b"hello")
        d.transport.open(TICKET, [1])
        assert p.ended(p.write(d, TICKET, [(1, 1)])) is WriteState.FAILED
        assert (d.pool.bytes == UNTOUCHED).all()

    # ------------------------------------------------------------------ writes

    @pytest.mark.parametrize(
        "pairs",
        [
            [(1, 1)],
            [(32, 1)],
            [(3, 32)],
            [(n, n) for n in range(1, 33)],
            [(n, 33 - n) for n in range(1, 33)],
            [(1, 7), (2, 5), (9, 30)],
            list(zip(*(random.Random(1).sample(range(1, 33), 20) for _ in "pd"), strict=True)),
        ],
        ids=["one", "last to first", "to last", "all", "reversed", "few", "scattered"],
    )
    def test_a_write_copies_its_blocks_and_no_others(
        self, ends: tuple[End, End], pairs: list[tuple[int, int]]
    ) -> None:
        p, d = ends
        before = p.pool.bytes.copy()
        d.transport.open(TICKET, [theirs for _, theirs in pairs])
        write = p.write(d, TICKET, pairs)
        assert p.ended(write) is WriteState.DONE
        expected = np.full_like(d.pool.bytes, UNTOUCHED)
        for ours, theirs in pairs:
            expected[theirs] = before[ours]
        assert (d.pool.bytes == expected).all()
        assert (p.pool.bytes == before).all()
        assert list(write.checksums) == [
            xxhash.xxh3_64_intdigest(before[ours].tobytes()) for ours, _ in pairs
        ]

    def test_several_writes_under_one_ticket(self, ends: tuple[End, End]) -> None:
        p, d = ends
        d.transport.open(TICKET, range(1, 11))
        writes = [p.write(d, TICKET, [(n, n), (n + 1, n + 1)]) for n in range(1, 10, 2)]
        assert [p.ended(write) for write in writes] == [WriteState.DONE] * 5
        assert (d.pool.bytes[1:11] == p.pool.bytes[1:11]).all()
        assert (d.pool.bytes[11:] == UNTOUCHED).all()

    def test_many_writers_and_both_directions_at_once(
        self, ends: tuple[End, End], make_transport: MakeTransport
    ) -> None:
        p, d = ends
        other = End(make_transport("p2"), make_random_pool(seed=1))
        d.transport.open(TICKET, range(1, 17))
        d.transport.open(OTHER, range(17, 33))
        back = HandoffTicket("back", 3)
        p.transport.open(back, range(17, 33))
        d.pool.bytes[0] = 7  # never travels
        writes = [
            (p, p.write(d, TICKET, [(n, n) for n in range(1, 17)])),
            (other, other.write(d, OTHER, [(n, n) for n in range(17, 33)])),
            (d, d.write(p, back, [(n, n) for n in range(17, 33)])),
        ]
        assert [end.ended(write) for end, write in writes] == [WriteState.DONE] * 3
        assert (d.pool.bytes[1:17] == p.pool.bytes[1:17]).all()
        assert (d.pool.bytes[17:] == other.pool.bytes[17:]).all()
        other.transport.close()

    def test_a_dead_peer_is_in_nobody_elses_way(
        self, ends: tuple[End, End], make_transport: MakeTransport
    ) -> None:
        p, d = ends
        dead = End(make_transport("dead"), make_pool())
        dead.transport.open(OTHER, [1])
        dead.transport.close()
        d.transport.open(TICKET, [1])
        writes = [p.write(dead, OTHER, [(1, 1)]), p.write(d, TICKET, [(1, 1)])]
        assert [p.ended(write) for write in writes] == [WriteState.FAILED, WriteState.DONE]

    # ------------------------------------------------------------------ what may be written

    @pytest.mark.parametrize(
        ("ticket", "pairs"),
        [
            (OTHER, [(1, 1)]),
            (HandoffTicket("request", 1), [(1, 1)]),
            (TICKET, [(1, 3)]),
            (TICKET, [(1, 1), (2, 2), (3, 3)]),
            (TICKET, [(1, 0)]),
            (TICKET, [(1, 33)]),
            (TICKET, [(1, -1)]),
        ],
        ids=[
            "ticket",
            "generation",
            "block",
            "last of several",
            "null block",
            "beyond",
            "negative",
        ],
    )
    def test_what_was_not_opened_is_refused(
        self, ends: tuple[End, End], ticket: HandoffTicket, pairs: list[tuple[int, int]]
    ) -> None:
        p, d = ends
        d.transport.open(TICKET, [1, 2])
        assert p.ended(p.write(d, ticket, pairs)) is WriteState.FAILED
        assert (d.pool.bytes == UNTOUCHED).all()
        assert p.ended(p.write(d, TICKET, [(1, 1), (2, 2)])) is WriteState.DONE

    def test_a_ticket_is_open_where_it_was_opened(
        self, ends: tuple[End, End], make_transport: MakeTransport
    ) -> None:
        p, d = ends
        other = End(make_transport("d2"), make_pool(fill=UNTOUCHED))
        d.transport.open(TICKET, [1])
        assert p.ended(p.write(other, TICKET, [(1, 1)])) is WriteState.FAILED
        assert (other.pool.bytes == UNTOUCHED).all()
        other.transport.close()

    # ------------------------------------------------------------------ fences

    def test_nothing_lands_after_a_fence(self, ends: tuple[End, End]) -> None:
        p, d = ends
        assert d.transport.fence(TICKET)  # it was never opened
        d.transport.open(TICKET, [1])
        d.transport.open(OTHER, [2])
        d.until(lambda: d.transport.fence(TICKET))
        assert p.ended(p.write(d, TICKET, [(1, 1)])) is WriteState.FAILED
        assert p.ended(p.write(d, OTHER, [(2, 2)])) is WriteState.DONE
        assert (d.pool.bytes[1] == UNTOUCHED).all()
        assert d.transport.fence(TICKET)

    def test_a_fence_is_proof_only_when_the_running_write_has_ended(
        self, ends: tuple[End, End]
    ) -> None:
        p, d = ends
        gate = p.pool.gate(2)
        d.transport.open(TICKET, [1, 2, 3])
        write = p.write(d, TICKET, [(1, 1), (2, 2), (3, 3)])
        gate.wait_until_reached()
        assert write.state is WriteState.PENDING
        assert not d.transport.fence(TICKET)
        assert not d.transport.fence(TICKET)
        assert d.transport.fence(OTHER)
        d.activity.clear()
        gate.open()
        d.until(lambda: d.transport.fence(TICKET))
        d.pool.bytes[:] = UNTOUCHED  # somebody else's from now on
        p.ended(write)
        assert (d.pool.bytes == UNTOUCHED).all()
        assert p.ended(p.write(d, TICKET, [(1, 1)])) is WriteState.FAILED

    def test_a_fence_holds_for_writes_that_wait_behind_others(self, ends: tuple[End, End]) -> None:
        p, d = ends
        gate = p.pool.gate(1)
        d.transport.open(TICKET, [1])
        d.transport.open(OTHER, [2])
        first, second = p.write(d, TICKET, [(1, 1)]), p.write(d, OTHER, [(2, 2)])
        gate.wait_until_reached()
        fenced = d.transport.fence(OTHER)
        gate.open()
        if not fenced:
            d.until(lambda: d.transport.fence(OTHER))
        d.pool.bytes[2] = UNTOUCHED
        assert p.ended(first) is WriteState.DONE
        p.ended(second)
        assert (d.pool.bytes[2] == UNTOUCHED).all()

    # ------------------------------------------------------------------ messages

    def test_messages_arrive_whole_once_and_in_order(self, ends: tuple[End, End]) -> None:
        p, d = ends
        messages = [bytes([n % 256]) * (n % 50) + n.to_bytes(4, "big") for n in range(2000)]
        for message in messages:
            p.transport.notify(d.endpoint, message)
        assert d.received(len(messages)) == messages
        assert list(d.transport.receive()) == []
        assert list(p.transport.receive()) == []

    def test_messages_while_a_write_runs(self, ends: tuple[End, End]) -> None:
        p, d = ends
        gate = p.pool.gate(1)
        d.transport.open(TICKET, [1])
        write = p.write(d, TICKET, [(1, 1)])
        gate.wait_until_reached()
        p.transport.notify(d.endpoint, b"alive")
        assert d.received(1) == [b"alive"]
        d.transport.notify(p.endpoint, b"stop")
        assert p.received(1) == [b"stop"]
        gate.open()
        assert p.ended(write) is WriteState.DONE

    def test_what_was_written_is_there_when_a_later_message_is(self, ends: tuple[End, End]) -> None:
        p, d = ends
        d.transport.open(TICKET, range(1, 33))
        for n in range(1, 33):
            assert p.ended(p.write(d, TICKET, [(n, n)])) is WriteState.DONE
            p.transport.notify(d.endpoint, b"done")
            assert d.received(1) == [b"done"]
            assert (d.pool.bytes[n] == p.pool.bytes[n]).all()

    # ------------------------------------------------------------------ the end

    @pytest.mark.parametrize("who", ["writer", "target"])
    def test_close_returns_when_the_pool_is_touched_no_more(
        self, ends: tuple[End, End], who: str
    ) -> None:
        p, d = ends
        gate = p.pool.gate(2)
        d.transport.open(TICKET, [1, 2, 3])
        write = p.write(d, TICKET, [(1, 1), (2, 2), (3, 3)])
        gate.wait_until_reached()
        closing = p if who == "writer" else d
        with ThreadPoolExecutor(1) as executor:
            closed = executor.submit(closing.transport.close)
            assert not _ends_within(closed.result, 0.05)
            assert write.state is WriteState.PENDING
            gate.open()
            closed.result(TIMEOUT_S)
        after = d.pool.bytes.copy()
        closing.pool.bytes[:] = 1
        if who == "writer":
            assert (d.pool.bytes == after).all()
            d.until(lambda: d.transport.fence(TICKET))
        else:
            p.ended(write)
            assert (d.pool.bytes == 1).all()

    def test_close_with_messages_unread(self, ends: tuple[End, End]) -> None:
        p, d = ends
        for _ in range(100):
            p.transport.notify(d.endpoint, b"unread")


def _ends_within(result: Callable[[float], object], seconds: float) -> bool:
    try:
        result(seconds)
    except TimeoutError:
        return False
    return True
