"""What the directory costs its callers, and what it keeps on the server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from directory import Gap
from protocol import LiveTransfer, TransferCounts, TransferDirection
from tests.directory.conformance import batch, info, sequences, status
from tests.directory.servers import Server, new_prefix

SETTLE_S = 5.0
MAX_PAIR_S = 50e-6  # of CPU, for heartbeat and publish


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def key(prefix: str, name: str) -> str:
    return f"{{{prefix}}}:v1:{name}"


def test_a_step_costs_its_thread_next_to_nothing(server: Server) -> None:
    with server.directory(new_prefix(), event_interval_s=0.05, status_interval_s=0.1) as directory:
        directory.register(info(), ttl_s=60)
        steps = [(status(num_steps=number), batch(number)) for number in range(1, 1001)]
        began = time.thread_time()
        for state, events in steps:
            directory.heartbeat(state, generation=0)
            directory.publish(events, generation=0)
        assert (time.thread_time() - began) / len(steps) < MAX_PAIR_S


def test_live_transfers_stay_at_home(server: Server) -> None:
    live = LiveTransfer(
        ticket="r/0",
        direction=TransferDirection.PUSH,
        peer="memory:x",
        state="pushing",
        reason=None,
        tokens=1,
        age_s=0.1,
        deadline_s=1.0,
    )
    prefix = new_prefix()
    with server.directory(prefix) as directory:
        directory.register(info(), ttl_s=60)
        transfers = TransferCounts(active=1, live=(live,))
        told = msgspec.structs.replace(status(), transfers=transfers)
        directory.heartbeat(told, generation=0)
        assert directory.sync(SETTLE_S)
        seen = directory.nodes()[0].status
        assert seen is not None
        assert seen.transfers == TransferCounts(active=1)


def test_the_stream_is_bounded(server: Server) -> None:
    prefix = new_prefix()
    with server.directory(prefix, follow=False, max_stream_entries=100) as directory:
        directory.register(info(), ttl_s=60)
        for number in range(1, 401):
            directory.publish(batch(number), generation=0)
            assert directory.sync(SETTLE_S)
    assert 100 <= server.ask("XLEN", key(prefix, "events")) < 300


def test_more_than_one_exchange_can_hold_is_told_in_order(server: Server) -> None:
    prefix = new_prefix()
    with (
        server.directory(prefix, follow=False, max_unsent_batches=10_000) as node_side,
        server.directory(prefix) as router_side,
    ):
        subscription = router_side.subscribe(max_batches=10_000)
        node_side.register(info(), ttl_s=60)
        for number in range(1, 5001):
            node_side.publish(batch(number), generation=0)
        assert node_side.sync(SETTLE_S)
        assert router_side.sync(SETTLE_S)
        assert sequences(subscription) == list(range(1, 5001))


def test_nodes_that_were_silent_for_long_are_forgotten(server: Server) -> None:
    prefix = new_prefix()
    with server.directory(prefix, retention_s=0.2) as directory:
        directory.register(info("d0"), ttl_s=0.1)
        time.sleep(0.3)  # on the server's clock
        directory.register(info("p0"), ttl_s=0.1)
        assert directory.sync(SETTLE_S)
        # The first still lives in this process, is told that it is unknown, and registers again.
        assert [record.info.node_id for record in directory.nodes()] == ["d0", "p0"]
    with server.directory(prefix, retention_s=0.2) as directory:
        time.sleep(0.3)
        directory.register(info("p1"), ttl_s=0.1)
        assert directory.sync(SETTLE_S)
        assert [record.info.node_id for record in directory.nodes()] == ["p1"]


def test_generations_of_nodes_that_are_gone_are_bounded(server: Server) -> None:
    prefix = new_prefix()
    with server.directory(prefix) as directory:
        directory.register(info("p0"), ttl_s=60)
        gone = [part for number in range(5000) for part in (f"gone-{number}", "1 left")]
        server.ask("HSET", key(prefix, "generations"), *gone)
        directory.register(info("p1"), ttl_s=60)
        assert sorted(server.ask("HKEYS", key(prefix, "generations"))) == [b"p0", b"p1"]


def test_what_cannot_be_read_is_passed_over(server: Server) -> None:
    prefix = new_prefix()
    with server.directory(prefix) as directory:
        subscription = directory.subscribe()
        directory.register(info("p0"), ttl_s=60)
        directory.publish(batch(1), generation=0)
        assert directory.sync(SETTLE_S)
        server.ask("HSET", key(prefix, "nodes"), "=x", b"\xff\x00", "@version", "another")
        server.ask("HSET", key(prefix, "generations"), "x", "y")
        server.ask("HSET", key(prefix, "statuses"), "x", "y", "p0", b"0:\xff:1")
        server.ask("HSET", key(prefix, "sequences"), "x", "0:0:9", "p0", "0:9")
        server.ask("XADD", key(prefix, "events"), "*", "b", b"\xff")
        server.ask("XADD", key(prefix, "events"), "*", "other", "1", "b", "2")
        directory.publish(batch(3), generation=0)
        assert directory.sync(SETTLE_S)
        assert directory.available
        assert [record.info for record in directory.nodes()] == [info("p0")]
        assert subscription.drain() == [batch(1), Gap("p0", 2), batch(3)]


def test_the_age_of_a_status_counts_its_way(server: Server) -> None:
    """Also for a router that comes later, and whatever the clocks of its host say."""
    prefix = new_prefix()
    with server.directory(prefix, follow=False, status_interval_s=0.2) as node_side:
        node_side.register(info(), ttl_s=60)
        began = time.monotonic()
        node_side.heartbeat(status(), generation=0)
        assert node_side.sync(SETTLE_S)
        time.sleep(0.3)
        with server.directory(prefix) as router_side:
            assert router_side.sync(SETTLE_S)
            (record,) = router_side.nodes()
            assert time.monotonic() - began + 0.05 > record.heartbeat_age_s >= 0.3
            assert record.blind_s < 0.3
