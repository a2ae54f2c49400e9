from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import BadMessage, Extents, WriteState
from kv_transfer.transports.nixl_agent import NixlAgent, NixlConfig, load_nixl
from kv_transfer.transports.nixl_frames import (
    Broken,
    Frame,
    Hello,
    Knock,
    NoOffer,
    Offer,
    Want,
    Writing,
    decode_hello,
    digest_of,
    encode_hello,
    of_node,
    of_transport,
    parse,
)
from kv_transfer.transports.nixl_path import NixlPath, NixlWrite
from kv_transfer.transports.port_lock import sources_to
from protocol import ConfigError, HandoffTicket
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, make_pool

TICKET = HandoffTicket("request", 0)
CONFIG = NixlConfig(transports="tcp")


@pytest.fixture
def theirs() -> Iterator[NixlAgent]:
    agent = NixlAgent("theirs", make_pool(), CONFIG)
    yield agent
    agent.close()


@pytest.fixture
def sent() -> list[Frame]:
    return []


@pytest.fixture
def path(sent: list[Frame]) -> Iterator[NixlPath]:
    open_agent = partial(NixlAgent, "ours", make_pool(), CONFIG)
    path = NixlPath("d", open_agent, sent.append, lambda: None)
    yield path
    path.close("the test is over")


@pytest.fixture
def offer(theirs: NixlAgent) -> Offer:
    metadata = theirs.metadata()
    return Offer(
        number=1,
        nixl_version=load_nixl().version,
        agent="theirs",
        metadata=metadata,
        digest=digest_of(metadata),
        device="cpu",
        address=0,
        num_bytes=33 * LAYOUT.bytes_per_block,
        port=theirs.port,
    )


def submitted(path: NixlPath) -> NixlWrite:
    write = NixlWrite("d", TICKET, Extents.of_blocks([(1, 1)], LAYOUT.bytes_per_block))
    path.submit(write)
    return write


@pytest.mark.parametrize(
    "wrong",
    [
        {"nixl_version": "0.9"},
        {"device": "tpu:0"},
        {"agent": "another"},
        {"digest": b""},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_offer_of_no_use(path: NixlPath, offer: Offer, wrong: dict[str, object]) -> None:
    write = submitted(path)
    path.take_offer(msgspec.structs.replace(offer, **wrong))
    assert write.state is WriteState.FAILED
    assert not path.busy


@pytest.mark.parametrize("length", [0, 1, 100, 200])
def test_truncated_metadata_are_not_given_to_nixl(
    path: NixlPath, offer: Offer, length: int
) -> None:
    """They would harm the agent; after them it still takes those that are whole."""
    write = submitted(path)
    path.take_offer(msgspec.structs.replace(offer, metadata=offer.metadata[:length]))
    assert write.state is WriteState.FAILED
    write = submitted(path)
    path.take_offer(offer)
    assert write.state is WriteState.PENDING
    assert path.busy


def test_nothing_is_written_under_void_tickets(path: NixlPath, offer: Offer) -> None:
    write = submitted(path)
    path.take_offer(msgspec.structs.replace(offer, void=(TICKET,)))
    path.turn()
    assert write.state is WriteState.FAILED


def test_one_offer_is_asked_for_and_another_when_that_is_of_no_use(
    path: NixlPath, sent: list[Frame], offer: Offer
) -> None:
    writes = [submitted(path), submitted(path)]
    assert sent == [Want(0)]
    path.take_offer(msgspec.structs.replace(offer, nixl_version="0.9"))
    assert [write.state for write in writes] == [WriteState.FAILED] * 2
    submitted(path)
    assert sent == [Want(0), Want(1)]


def test_who_gets_no_offer_does_not_wait(path: NixlPath) -> None:
    write = submitted(path)
    path.give_up("no room")
    assert write.state is WriteState.FAILED


def test_without_room_for_an_agent_of_ours_nothing_is_written(sent: list[Frame]) -> None:
    def open_agent() -> NixlAgent:
        raise ConfigError("nixl_device", "no room")

    write = submitted(NixlPath("d", open_agent, sent.append, lambda: None))
    assert write.state is WriteState.FAILED


def test_the_peer_is_told_from_where_we_connect(
    path: NixlPath, sent: list[Frame], offer: Offer
) -> None:
    before = sources_to(offer.port)
    submitted(path)
    path.take_offer(offer)
    give_up = time.monotonic() + TIMEOUT_S
    while not (knocks := [frame for frame in sent if isinstance(frame, Knock)]):
        assert time.monotonic() < give_up
        path.turn()  # looks again, as long as the write is not done
    (knock,) = knocks
    assert knock.number == offer.number
    assert set(knock.sources) == sources_to(offer.port) > before


@pytest.mark.parametrize(
    "frame",
    [
        Want(3),
        NoOffer("no room"),
        Knock(1, (("127.0.0.1", 65535), ("::1", 0))),
        Writing(1, True),
        Writing(2, False),
        Broken(7),
    ],
)
def test_frames_come_back_as_they_were(frame: Frame) -> None:
    assert parse(of_transport(frame)) == frame


def test_hello_comes_back_as_it_was() -> None:
    hello = Hello(nixl_version="1.5.1", device="cuda:3")
    assert decode_hello(encode_hello(hello)) == hello


@given(st.binary(max_size=300))
def test_messages_of_nodes_are_anything(message: bytes) -> None:
    assert parse(of_node(message)) == message


@given(st.binary(max_size=300), st.sampled_from([b"", b"t"]))
def test_anything_else_is_no_message(data: bytes, head: bytes) -> None:
    try:
        parsed = parse(head + data)
    except BadMessage:
        return
    assert isinstance(parsed, bytes) or of_transport(parsed)


@given(st.binary(max_size=300))
def test_anything_else_is_no_hello(data: bytes) -> None:
    try:
        decode_hello(data)
    except BadMessage:
        return
    assert msgspec.msgpack.decode(data)
