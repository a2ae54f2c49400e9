"""The server goes away, comes back empty, hangs or forgets: nodes and routers go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from directory import Gap, RedisDirectory, StaleGeneration
from tests.directory.conformance import batch, info, sequences, status
from tests.directory.servers import KINDS, Server, new_prefix

SETTLE_S = 8.0


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.stop()


@contextmanager
def both_sides(
    server: Server, **settings: float
) -> Iterator[tuple[RedisDirectory, RedisDirectory]]:
    prefix = new_prefix()
    settings = {"io_timeout_s": 0.3, **settings}
    with (
        server.directory(prefix, follow=False, **settings) as node_side,
        server.directory(prefix, **settings) as router_side,
    ):
        yield node_side, router_side


def wait_for(condition: Callable[[], bool]) -> None:
    """There is nothing to wait on: what others have noticed is what this asks for."""
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def settle(node_side: RedisDirectory, router_side: RedisDirectory) -> None:
    assert node_side.sync(SETTLE_S)
    assert router_side.sync(SETTLE_S)


def test_a_killed_server_is_done_without_and_found_again(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with both_sides(server) as (node_side, router_side):
        subscription = router_side.subscribe()
        node_side.register(info(), ttl_s=0.8)
        node_side.heartbeat(status(num_steps=1), generation=0)
        node_side.publish(batch(1), generation=0)
        settle(node_side, router_side)
        server.kill()
        wait_for(lambda: not node_side.available and not router_side.available)
        began = time.monotonic()
        while time.monotonic() - began < 1.4:
            node_side.heartbeat(status(num_steps=2), generation=0)
            (record,) = router_side.nodes()
            assert record.alive
        (record,) = router_side.nodes()
        assert record.heartbeat_age_s > 1.4
        node_side.publish(batch(2), generation=0)
        assert record.status == status(num_steps=1)
        server.start_empty()
        node_side.heartbeat(status(num_steps=3), generation=0)
        settle(node_side, router_side)
        (record,) = router_side.nodes()
        assert record.alive
        assert record.status == status(num_steps=3)
        assert sequences(subscription) == [1, 2]
        assert node_side.available
        assert router_side.available
    messages = [record.getMessage() for record in caplog.records if "directory" in record.name]
    assert len([text for text in messages if "away" in text]) == 2  # one for each of the two
    assert len([text for text in messages if "is back" in text]) == 2
    assert server.password not in caplog.text


def test_a_node_that_dies_during_an_outage_is_found_dead(server: Server) -> None:
    with both_sides(server) as (node_side, router_side):
        node_side.register(info(), ttl_s=0.8)
        settle(node_side, router_side)
        with server.hung():
            wait_for(lambda: not router_side.available)
            time.sleep(1.2)
            assert router_side.nodes()[0].alive
        assert router_side.sync(SETTLE_S)
        wait_for(lambda: not router_side.nodes()[0].alive)


def test_what_was_published_before_the_data_was_lost_is_a_gap(server: Server) -> None:
    with both_sides(server) as (node_side, router_side):
        node_side.register(info(), ttl_s=60)
        node_side.publish(batch(1), generation=0)
        settle(node_side, router_side)
        subscription = router_side.subscribe()
        with router_side._lock:  # the reader sees nothing of this, until it is gone
            for sequence in (2, 3):
                node_side.publish(batch(sequence), generation=0)
            assert node_side.sync(SETTLE_S)
            server.ask("FLUSHALL")
        settle(node_side, router_side)
        node_side.publish(batch(4), generation=0)
        settle(node_side, router_side)
        assert subscription.drain() == [Gap("p0", 3), batch(4)]
        assert [record.info for record in router_side.nodes()] == [info()]


def test_a_reader_that_was_away_is_told_what_it_missed(server: Server) -> None:
    """The stream keeps 1 entry, about; the reader hangs while many go by."""
    with both_sides(server, max_stream_entries=1) as (node_side, router_side):
        subscription = router_side.subscribe()
        node_side.register(info(), ttl_s=60)
        settle(node_side, router_side)
        with router_side._lock:  # the reader's thread cannot go on
            for sequence in range(1, 400):
                node_side.publish(batch(sequence), generation=0)
                if sequence % 2:
                    assert node_side.sync(SETTLE_S)
        settle(node_side, router_side)
        drained = subscription.drain()
        assert isinstance(drained[0], Gap)
        assert [item.sequence for item in drained[1:]] == list(range(drained[0].sequence + 1, 400))
        assert len(drained) < 399


def test_a_stream_that_is_gone_is_a_gap_even_if_nothing_follows(server: Server) -> None:
    with both_sides(server) as (node_side, router_side):
        subscription = router_side.subscribe()
        node_side.register(info(), ttl_s=60)
        settle(node_side, router_side)
        with router_side._lock:
            node_side.publish(batch(1), generation=0)
            assert node_side.sync(SETTLE_S)
            (stream,) = server.ask("KEYS", "*:events")
            server.ask("DEL", stream)
        settle(node_side, router_side)
        assert subscription.drain() == [Gap("p0", 1)]


def test_more_than_can_be_kept_during_an_outage_is_a_gap(server: Server) -> None:
    with both_sides(server, max_unsent_batches=10) as (node_side, router_side):
        subscription = router_side.subscribe()
        node_side.register(info(), ttl_s=60)
        settle(node_side, router_side)
        server.kill()
        wait_for(lambda: not node_side.available)
        for sequence in range(1, 40):
            node_side.publish(batch(sequence), generation=0)
        server.start_empty()
        settle(node_side, router_side)
        gap, *kept = subscription.drain()
        assert isinstance(gap, Gap)
        assert 0 < len(kept) <= 10
        assert [item.sequence for item in kept] == list(range(gap.sequence + 1, 40))


def test_a_hung_server_delays_nobody_and_repeats_nothing(server: Server) -> None:
    with both_sides(server) as (node_side, router_side):
        subscription = router_side.subscribe()
        node_side.register(info(), ttl_s=60)
        settle(node_side, router_side)
        with server.hung():
            began = time.monotonic()
            for sequence in range(1, 101):
                node_side.publish(batch(sequence), generation=0)
                node_side.heartbeat(status(num_steps=sequence), generation=0)
                router_side.nodes()
                subscription.drain()
            assert time.monotonic() - began < 0.2
            wait_for(lambda: not node_side.available)  # what was sent will be heard a second time
        settle(node_side, router_side)
        assert sequences(subscription) == list(range(1, 101))


def test_what_is_registered_during_an_outage_is_told_afterwards(server: Server) -> None:
    with both_sides(server) as (node_side, router_side):
        server.kill()
        wait_for(lambda: not node_side.available)
        began = time.monotonic()
        node_side.register(info("p1"), ttl_s=60)
        node_side.heartbeat(status("p1"), generation=0)
        node_side.register(info("p2"), ttl_s=60)
        node_side.deregister("p2", generation=0)
        assert time.monotonic() - began < 0.2
        server.start_empty()
        settle(node_side, router_side)
        (record,) = router_side.nodes()
        assert record.info == info("p1")
        assert record.status == status("p1")


def test_a_generation_that_was_replaced_during_an_outage_hears_of_it(server: Server) -> None:
    prefix = new_prefix()
    with (
        server.directory(prefix, follow=False, io_timeout_s=0.3) as earlier,
        server.directory(prefix, follow=True, io_timeout_s=0.3) as later,
    ):
        earlier.register(info(generation=1), ttl_s=60)
        subscription = later.subscribe()
        server.kill()
        wait_for(lambda: not earlier.available and not later.available)
        later.register(info(generation=2), ttl_s=60)
        later.publish(batch(1), generation=2)
        earlier.publish(batch(7), generation=1)
        server.start_empty()
        assert later.sync(SETTLE_S)
        assert earlier.sync(SETTLE_S)
        with pytest.raises(StaleGeneration) as caught:
            earlier.heartbeat(status(), generation=1)
        assert caught.value.current == 2
        assert later.sync(SETTLE_S)
        assert later.sync(SETTLE_S)
        assert [record.info.generation for record in later.nodes()] == [2]
        assert sequences(subscription) == [1]


def test_a_replaced_node_hears_of_it_without_saying_anything(server: Server) -> None:
    prefix = new_prefix()
    with (
        server.directory(prefix, follow=False) as earlier,
        server.directory(prefix, follow=False) as later,
    ):
        earlier.register(info(generation=1), ttl_s=60)
        later.register(info(generation=2), ttl_s=60)
        assert earlier.sync(SETTLE_S)
        with pytest.raises(StaleGeneration):
            earlier.heartbeat(status(), generation=1)


def test_nodes_stay_listed_until_they_are_back_in_an_empty_server(server: Server) -> None:
    prefix = new_prefix()
    with server.directory(prefix) as router_side:
        with server.directory(prefix, follow=False) as node_side:
            node_side.register(info(), ttl_s=60)
        assert router_side.sync(SETTLE_S)  # the node's process has ended, without deregistering
        server.ask("FLUSHALL")
        assert router_side.sync(SETTLE_S)
        assert [record.info for record in router_side.nodes()] == [info()]


def test_a_server_that_may_only_be_read_still_serves_readers(server: Server) -> None:
    with both_sides(server) as (node_side, router_side):
        node_side.register(info(), ttl_s=60)
        settle(node_side, router_side)
        server.ask("REPLICAOF", "127.0.0.1", "1")
        node_side.heartbeat(status(), generation=0)
        wait_for(lambda: not node_side.available)
        assert router_side.sync(SETTLE_S)
        assert [record.info for record in router_side.nodes()] == [info()]
        server.ask("REPLICAOF", "NO", "ONE")
        settle(node_side, router_side)
        assert router_side.nodes()[0].status == status()


def test_a_server_that_is_full_is_tried_again(server: Server) -> None:
    prefix = new_prefix()
    with server.directory(prefix) as inside, RedisDirectory(server.config(prefix)) as outside:
        with server.client() as client:
            client.config_set("maxclients", 2)
            outside.start(need_server=False)
            outside.register(info(), ttl_s=60)
            assert inside.sync(SETTLE_S)
            assert not outside.available
        assert outside.sync(SETTLE_S)
        assert inside.sync(SETTLE_S)
        assert [record.info for record in inside.nodes()] == [info()]


def test_closing_is_quick_and_leaves_no_thread(server: Server) -> None:
    before = threading.active_count()
    with both_sides(server) as (node_side, _):
        node_side.register(info(), ttl_s=60)
        server.kill()
        began = time.monotonic()
    assert time.monotonic() - began < 2.0
    assert threading.active_count() <= before


def test_the_last_words_are_heard(server: Server) -> None:
    prefix = new_prefix()
    with server.directory(prefix) as router_side:
        subscription = router_side.subscribe()
        with server.directory(prefix, follow=False, event_interval_s=30.0) as node_side:
            node_side.register(info("p0"), ttl_s=60)
            node_side.register(info("p1"), ttl_s=60)
            node_side.publish(batch(1), generation=0)
            node_side.deregister("p1", generation=0)
        assert router_side.sync(SETTLE_S)
        assert [record.info.node_id for record in router_side.nodes()] == ["p0"]
        assert sequences(subscription) == [1]
