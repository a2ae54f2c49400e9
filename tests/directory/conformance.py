"""What every directory must do, seen by the nodes that write to it and a router that reads it."""

from __future__ import annotations

from typing import Protocol

import pytest

from directory import Directory, Gap, NotRegistered, StaleGeneration, Subscription
from protocol import (
    BlockCounts,
    BlockEventBatch,
    BlockStored,
    NodeInfo,
    NodeStatus,
    Role,
    TransferCounts,
)

TTL_S = 3.0


class Harness(Protocol):
    """One directory, with a client on either side (which may be the same object)."""

    node_side: Directory
    router_side: Directory
    ttl_s: float  # short enough to wait for its end, where time cannot be made to pass

    def advance(self, seconds: float) -> None:
        """Let this much of the directory's time pass."""

    def settle(self) -> None:
        """Return when all that was written on one side can be read on the other."""


def info(node_id: str = "p0", *, generation: int = 0, role: Role = Role.PREFILL) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        role=role,
        model="m",
        fingerprint="f",
        endpoint="memory:x",
        block_size=16,
        num_blocks=100,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        generation=generation,
    )


def status(node_id: str = "p0", *, num_steps: int = 0) -> NodeStatus:
    return NodeStatus(
        node_id=node_id,
        role=Role.PREFILL,
        healthy=True,
        draining=False,
        num_running=0,
        num_waiting=0,
        num_skipped_waiting=0,
        num_intake=0,
        queued_tokens=0,
        prefill_tokens_per_s=0.0,
        blocks=BlockCounts(total=100, free=100, cached=0, used=0, quarantined=0),
        transfers=TransferCounts(),
        num_preemptions=0,
        num_prefix_queries=0,
        num_prefix_hits=0,
        num_prompt_tokens_computed=0,
        num_prompt_tokens_loaded=0,
        num_prompt_tokens_recomputed=0,
        num_generated_tokens=0,
        num_steps=num_steps,
    )


def batch(sequence: int, node_id: str = "p0") -> BlockEventBatch:
    stored = BlockStored((sequence.to_bytes(16, "little"),), None)
    return BlockEventBatch(node_id, sequence, (stored,))


def sequences(subscription: Subscription, node_id: str = "p0") -> list[int]:
    """The numbers of the drained batches of one node; there must be no gap."""
    drained = subscription.drain()
    assert not any(isinstance(item, Gap) for item in drained)
    return [item.sequence for item in drained if item.node_id == node_id]


class DirectoryConformance:
    """Inherit from this, with a fixture `harness`."""

    def test_a_new_directory_is_empty(self, harness: Harness) -> None:
        assert harness.router_side.nodes() == ()
        assert harness.router_side.subscribe().drain() == []

    def test_registered_nodes_are_listed_in_order(self, harness: Harness) -> None:
        for node_id in ("p1", "d0", "p0"):
            harness.node_side.register(info(node_id), ttl_s=harness.ttl_s)
        harness.settle()
        records = harness.router_side.nodes()
        assert [record.info for record in records] == [info("d0"), info("p0"), info("p1")]
        assert all(record.alive and record.status is None for record in records)

    def test_a_heartbeat_brings_the_status(self, harness: Harness) -> None:
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        for num_steps in (1, 2):
            harness.node_side.heartbeat(status(num_steps=num_steps), generation=0)
        harness.settle()
        (record,) = harness.router_side.nodes()
        assert record.status == status(num_steps=2)

    def test_a_silent_node_is_dead_but_listed_and_revives(self, harness: Harness) -> None:
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        harness.node_side.heartbeat(status(), generation=0)
        harness.advance(harness.ttl_s * 1.5)
        (record,) = harness.router_side.nodes()
        assert not record.alive
        assert record.heartbeat_age_s > harness.ttl_s
        harness.node_side.heartbeat(status(), generation=0)
        harness.settle()
        (record,) = harness.router_side.nodes()
        assert record.alive
        assert record.heartbeat_age_s < harness.ttl_s

    def test_heartbeats_keep_a_node_alive(self, harness: Harness) -> None:
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        for _ in range(3):
            harness.advance(harness.ttl_s * 0.6)
            harness.node_side.heartbeat(status(), generation=0)
        harness.settle()
        assert harness.router_side.nodes()[0].alive

    def test_a_deregistered_node_is_forgotten(self, harness: Harness) -> None:
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        harness.node_side.deregister("p0", generation=0)
        harness.node_side.deregister("p0", generation=0)
        harness.settle()
        assert harness.router_side.nodes() == ()

    def test_an_unknown_node_is_told_to_register(self, harness: Harness) -> None:
        with pytest.raises(NotRegistered, match="p0"):
            harness.node_side.heartbeat(status(), generation=0)
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        harness.node_side.deregister("p0", generation=0)
        with pytest.raises(NotRegistered):
            harness.node_side.heartbeat(status(), generation=0)

    def test_registering_again_is_harmless(self, harness: Harness) -> None:
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        harness.advance(harness.ttl_s * 1.5)
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        harness.settle()
        (record,) = harness.router_side.nodes()
        assert record.alive

    def test_a_restarted_node_replaces_the_earlier_one(self, harness: Harness) -> None:
        harness.node_side.register(info(generation=3), ttl_s=harness.ttl_s)
        harness.node_side.heartbeat(status(num_steps=9), generation=3)
        harness.node_side.register(info(generation=4), ttl_s=harness.ttl_s)
        harness.settle()
        (record,) = harness.router_side.nodes()
        assert record.info.generation == 4
        assert record.status is None

    def test_an_earlier_generation_is_refused(self, harness: Harness) -> None:
        harness.node_side.register(info(generation=4), ttl_s=harness.ttl_s)
        with pytest.raises(StaleGeneration) as caught:
            harness.node_side.register(info(generation=3), ttl_s=harness.ttl_s)
        assert caught.value.current == 4
        with pytest.raises(StaleGeneration):
            harness.node_side.heartbeat(status(), generation=3)
        harness.node_side.deregister("p0", generation=3)
        harness.settle()
        assert [record.info.generation for record in harness.router_side.nodes()] == [4]

    def test_an_earlier_generation_is_refused_after_the_later_one_left(
        self, harness: Harness
    ) -> None:
        harness.node_side.register(info(generation=4), ttl_s=harness.ttl_s)
        harness.node_side.deregister("p0", generation=4)
        with pytest.raises(StaleGeneration):
            harness.node_side.register(info(generation=3), ttl_s=harness.ttl_s)
        with pytest.raises(StaleGeneration):
            harness.node_side.heartbeat(status(), generation=3)

    def test_every_subscriber_gets_every_batch_in_order(self, harness: Harness) -> None:
        first, second = harness.router_side.subscribe(), harness.router_side.subscribe()
        for node_id in ("p0", "p1"):
            harness.node_side.register(info(node_id), ttl_s=harness.ttl_s)
        for sequence in range(5):
            for node_id in ("p0", "p1"):
                harness.node_side.publish(batch(sequence, node_id), generation=0)
        harness.settle()
        for node_id, subscription in (("p0", first), ("p1", second)):
            assert sequences(subscription, node_id) == [0, 1, 2, 3, 4]
            assert subscription.drain() == []

    def test_batches_arrive_whole(self, harness: Harness) -> None:
        subscription = harness.router_side.subscribe()
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        harness.node_side.publish(batch(7), generation=0)
        harness.settle()
        assert subscription.drain() == [batch(7)]

    def test_a_subscription_begins_when_it_is_made(self, harness: Harness) -> None:
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        harness.node_side.publish(batch(0), generation=0)
        harness.settle()
        subscription = harness.router_side.subscribe()
        harness.node_side.publish(batch(1), generation=0)
        harness.settle()
        assert sequences(subscription) == [1]

    def test_a_slow_subscriber_is_told_of_its_gap(self, harness: Harness) -> None:
        slow = harness.router_side.subscribe(max_batches=3)
        fast = harness.router_side.subscribe()
        for node_id in ("p0", "p1"):
            harness.node_side.register(info(node_id), ttl_s=harness.ttl_s)
        harness.node_side.publish(batch(0, "p1"), generation=0)
        harness.settle()  # the order between nodes is nobody's promise
        for sequence in range(5):
            harness.node_side.publish(batch(sequence), generation=0)
        harness.settle()
        drained = slow.drain()
        gaps = [item for item in drained if isinstance(item, Gap)]
        kept = [item for item in drained if isinstance(item, BlockEventBatch)]
        assert sorted(gaps, key=lambda gap: gap.node_id) == [Gap("p0", 1), Gap("p1", 0)]
        assert drained[: len(gaps)] == gaps
        assert [item.sequence for item in kept] == [2, 3, 4]
        assert slow.drain() == []
        assert sequences(fast) == [0, 1, 2, 3, 4]
        harness.node_side.publish(batch(5), generation=0)
        harness.settle()
        assert sequences(slow) == [5]

    def test_a_closed_subscription_gets_nothing(self, harness: Harness) -> None:
        subscription = harness.router_side.subscribe()
        harness.node_side.register(info(), ttl_s=harness.ttl_s)
        harness.node_side.publish(batch(0), generation=0)
        subscription.close()
        subscription.close()
        harness.node_side.publish(batch(1), generation=0)
        harness.settle()
        assert subscription.drain() == []

    def test_batches_of_others_than_the_registered_generation_are_dropped(
        self, harness: Harness
    ) -> None:
        subscription = harness.router_side.subscribe()
        harness.node_side.publish(batch(0), generation=0)
        harness.node_side.register(info(generation=1), ttl_s=harness.ttl_s)
        harness.node_side.publish(batch(1), generation=0)
        harness.node_side.publish(batch(2), generation=1)
        harness.node_side.deregister("p0", generation=1)
        harness.node_side.publish(batch(3), generation=1)
        harness.settle()
        assert sequences(subscription) == [2]

    def test_undrained_batches_of_an_earlier_generation_vanish(self, harness: Harness) -> None:
        subscription = harness.router_side.subscribe(max_batches=2)
        for node_id in ("p0", "p1"):
            harness.node_side.register(info(node_id), ttl_s=harness.ttl_s)
        for sequence in (10, 11):
            harness.node_side.publish(batch(sequence), generation=0)
        harness.settle()
        harness.node_side.publish(batch(5, "p1"), generation=0)  # batch 10 becomes a gap
        harness.settle()
        harness.node_side.register(info(generation=1), ttl_s=harness.ttl_s)
        harness.node_side.publish(batch(0), generation=1)
        harness.settle()
        assert subscription.drain() == [batch(5, "p1"), batch(0)]
