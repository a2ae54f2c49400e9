"""What arrives damaged, twice, unasked for, or not at all understood."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kv_transfer import MemoryHub, PeerUnreachable, Reason
from kv_transfer.wire import (
    VERSION,
    Arrived,
    Cancel,
    Closed,
    Commit,
    Destination,
    Heartbeat,
    PrefillStarted,
)
from protocol import FinishReason, HandoffTicket, TransferCounts
from tests.kv_transfer.handoff_ends import (
    BLOCK,
    COMMITTED,
    CONFIG,
    D_TABLE,
    LOST,
    P_TABLE,
    SENT,
    Clock,
    Decode,
    End,
    FakeRequest,
    Prefill,
    arrives,
    settle,
)
from tests.kv_transfer.pools import LAYOUT

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# ---------------------------------------------------------------------- damage


def test_a_block_that_was_damaged_on_its_way(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    d.pool.bytes[D_TABLE[1], 100] ^= 1
    d.until(lambda: d.reasons(at_d) != [])
    assert COMMITTED not in d.told(at_d)
    assert d.reasons(at_d) == [Reason.CHECKSUM]
    assert d.received == {}
    d.end(at_d, FinishReason.ERROR)
    d.poll()
    assert d.received == {at_d.request_id: ()}
    assert d.connector.counts() == TransferCounts(failed=1, reasons={"checksum": 1})
    assert p.connector.counts().committed == 1  # it did its part


@pytest.mark.parametrize("num_checksums", [1, 2, 4])
def test_a_commit_with_another_number_of_checksums(
    p: Prefill, d: Decode, num_checksums: int
) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 20)
    d.reserve(at_d, D_TABLE)
    p.say(d, Commit(at_p.ticket, 40, (7,), (0,) * num_checksums))
    d.until(lambda: d.reasons(at_d) != [])
    assert d.reasons(at_d) == [Reason.CHECKSUM]
    d.end(at_d)
    p.connector.abandon_source(at_p.request_id)
    p.until(lambda: SENT in p.told(at_p))


def test_a_commit_for_which_nothing_was_reserved(p: Prefill, d: Decode) -> None:
    """D has no block of it, so whatever P believes, nothing is here."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.say(d, Commit(at_p.ticket, 40, (7,), ()))
    d.poll()
    assert d.told(at_d) == [LOST]
    assert d.connector.get_num_new_matched_tokens(at_d, 0) == (None, False)
    d.end(at_d)
    p.connector.abandon_source(at_p.request_id)


def test_a_destination_that_is_too_small(p: Prefill, d: Decode) -> None:
    """It ends this hand-off, not the node."""
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    p.transport.receive()
    d.say(p, Destination(at_p.ticket, 1, 0, D_TABLE[:2]))
    p.until(lambda: SENT in p.told(at_p))
    assert p.reasons(at_p) == [Reason.LAYOUT]
    d.poll()
    assert d.reasons(at_d) == [Reason.LAYOUT]
    d.end(at_d)


def test_what_is_no_message_is_dropped(
    p: Prefill, d: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    p.transport.notify(d.endpoint, b"nonsense")
    d.transport.notify(p.endpoint, bytes([0x92, VERSION + 1, 0xC0]))
    with caplog.at_level(logging.WARNING):
        d.poll()
        d.reserve(at_d, D_TABLE)
        arrives(p, d, at_d)
    assert "dropped what memory:p sent: not a message" in caplog.text
    assert f"dropped what memory:d sent: the peer speaks version {VERSION + 1}" in caplog.text


def test_a_peer_with_other_blocks_is_refused(hub: MemoryHub, clock: Clock, p: Prefill) -> None:
    layout = msgspec.structs.replace(LAYOUT, fingerprint="another model")
    other = End(hub, "other", clock, layout=layout)
    at_p = p.add(other)
    p.poll()
    assert p.reasons(at_p) == [Reason.LAYOUT]
    detail = p.events[-1].detail
    assert detail == "fingerprint is f on memory:p, but another model on memory:other"
    assert other.read() == [Closed(at_p.ticket, Reason.LAYOUT, detail)]
    other.close()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"dtype": "bfloat16", "bytes_per_block": LAYOUT.bytes_per_block // 2},
         "dtype is float32 on memory:p, but bfloat16 on memory:other"),
        ({"fingerprint": "f-int8"},
         "fingerprint is f on memory:p, but f-int8 on memory:other"),
    ],
)  # fmt: skip
def test_a_peer_that_computes_in_other_numbers_is_refused(
    hub: MemoryHub, clock: Clock, p: Prefill, other: dict[str, Any], difference: str
) -> None:
    peer = End(hub, "other", clock, layout=msgspec.structs.replace(LAYOUT, **other))
    at_p = p.add(peer)
    p.poll()
    assert p.reasons(at_p) == [Reason.LAYOUT]
    assert p.events[-1].detail == difference
    assert peer.read() == [Closed(at_p.ticket, Reason.LAYOUT, difference)]
    peer.close()


def test_nobody_to_push_to(hub: MemoryHub, clock: Clock, p: Prefill, d: Decode) -> None:
    gone = End(hub, "gone", clock)
    gone.close()
    p.poll()  # that it is gone is old news
    at_p = p.add(gone)
    p.poll()
    assert p.reasons(at_p) == [Reason.PEER_LOST]
    assert "memory:gone" in p.events[-1].detail


def test_no_way_to_a_peer(p: Prefill, d: Decode) -> None:
    ticket = HandoffTicket("r", 0)
    with pytest.raises(PeerUnreachable, match="tcp:far"):
        p.connector.add_source(ticket, "tcp:far", arrival_time=0.0)
    with pytest.raises(PeerUnreachable, match="tcp:far"):
        d.connector.add_sink(ticket, "tcp:far")


# ---------------------------------------------------------------------- odd messages


Say = Callable[[Prefill, Decode, FakeRequest], None]

ODD: dict[str, Say] = {
    "start": lambda p, d, r: p.say(d, PrefillStarted(r.ticket)),
    "heartbeat": lambda p, d, r: p.say(d, Heartbeat(r.ticket)),
    "destination": lambda p, d, r: d.say(p, Destination(r.ticket, 1, 0, D_TABLE)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_repeated_messages_do_no_harm(p: Prefill, d: Decode, clock: Clock, odd: Say) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.compute(at_p, P_TABLE, 20)
    d.poll()
    d.reserve(at_d, D_TABLE)
    for _ in range(3):
        odd(p, d, at_p)
        settle(p, d)
    p.compute(at_p, P_TABLE, 20)
    p.finish(at_p)
    odd(p, d, at_p)
    arrives(p, d, at_d)
    odd(p, d, at_p)
    settle(p, d)
    clock.advance(CONFIG.transfer_timeout_s + 1)
    settle(p, d)
    assert p.reasons(at_p) == [None]
    assert d.told(at_d).count(COMMITTED) == 1


@pytest.mark.parametrize("checksums", [(), (1, 2, 3)])
def test_a_repeated_end_does_no_harm(p: Prefill, d: Decode, checksums: tuple[int, ...]) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    arrives(p, d, at_d)
    p.say(d, Commit(at_p.ticket, 40, (8,), checksums))
    p.say(d, Closed(at_p.ticket, Reason.WRITE_FAILED))
    d.say(p, Cancel(at_p.ticket, Reason.CANCELLED))
    settle(d, p)
    assert d.received == {at_d.request_id: (7,)}
    assert d.reasons(at_d) == []


def test_a_commit_that_comes_twice_before_d_looks(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    p.until(lambda: SENT in p.told(at_p))
    d.pool.bytes[D_TABLE[0], 0] ^= 1
    commit = next(message for message in d.read() if isinstance(message, Commit))
    for _ in range(2):
        p.say(d, commit)
    d.until(lambda: d.reasons(at_d) != [])
    settle(p, d)
    assert d.reasons(at_d) == [Reason.CHECKSUM]  # told once
    d.end(at_d)


def test_a_stale_generation_is_another_hand_off(p: Prefill, d: Decode) -> None:
    at_p = p.add(d)
    at_d = d.add(p, at_p)
    p.prefill(at_p, P_TABLE)
    d.reserve(at_d, D_TABLE)
    other = HandoffTicket("r", 1)
    p.say(d, Closed(other, Reason.CANCELLED))
    d.say(p, Cancel(other, Reason.CANCELLED))
    arrives(p, d, at_d)


def test_whoever_asks_after_an_unknown_hand_off_is_told(p: Prefill, d: Decode) -> None:
    unknown = HandoffTicket("unknown", 3)
    d.say(p, Destination(unknown, 1, 0, (1,)))
    d.say(p, Cancel(unknown, Reason.DEADLINE))
    p.poll()
    closed = Closed(unknown, Reason.PEER_CANCELLED)
    assert d.read() == [closed, closed]
    for message in (Heartbeat(unknown), Commit(unknown, 40, (1,), ()), closed):
        p.say(d, message)
    d.poll()
    assert p.read() == [Arrived(unknown)]  # else P would say it again and again


def test_blocks_are_named_by_their_number_in_the_prompt(p: Prefill, d: Decode) -> None:
    """A table of D may be longer than the prompt; what is behind it does not travel."""
    at_p = p.add(d, 2 * BLOCK)
    at_d = d.add(p, at_p)
    p.prefill(at_p, (1, 2))
    d.reserve(at_d, (5, 6))
    arrives(p, d, at_d)
    assert d.is_untouched([n for n in range(1, 33) if n not in (5, 6)])
