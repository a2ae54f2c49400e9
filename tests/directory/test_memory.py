from __future__ import annotations

import threading

import pytest

from directory import Directory, Gap, MemoryDirectory
from tests.directory.conformance import TTL_S, DirectoryConformance, batch, info, status


class MemoryHarness:
    def __init__(self) -> None:
        self.now = 1000.0
        directory = MemoryDirectory(clock=lambda: self.now)
        self.node_side: Directory = directory
        self.router_side: Directory = directory
        self.ttl_s = TTL_S

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def settle(self) -> None:
        pass


class TestMemoryDirectory(DirectoryConformance):
    @pytest.fixture
    def harness(self) -> MemoryHarness:
        return MemoryHarness()


def test_alive_up_to_the_ttl_exactly() -> None:
    harness = MemoryHarness()
    harness.node_side.register(info(), ttl_s=TTL_S)
    harness.advance(TTL_S)
    assert harness.router_side.nodes()[0].alive
    harness.advance(0.001)
    assert not harness.router_side.nodes()[0].alive


def test_many_threads_lose_nothing() -> None:
    """Nodes publish from their engine threads while a router drains."""
    directory = MemoryDirectory()
    subscription = directory.subscribe(max_batches=10_000)
    node_ids = [f"n{index}" for index in range(4)]
    for node_id in node_ids:
        directory.register(info(node_id), ttl_s=TTL_S)

    def live(node_id: str) -> None:
        for sequence in range(500):
            directory.publish(batch(sequence, node_id), generation=0)
            directory.heartbeat(status(node_id), generation=0)

    threads = [threading.Thread(target=live, args=(node_id,)) for node_id in node_ids]
    for thread in threads:
        thread.start()
    drained = []
    while any(thread.is_alive() for thread in threads):
        drained += subscription.drain()
        assert len(directory.nodes()) == 4
    for thread in threads:
        thread.join()
    drained += subscription.drain()
    assert not any(isinstance(item, Gap) for item in drained)
    for node_id in node_ids:
        assert [item.sequence for item in drained if item.node_id == node_id] == list(range(500))
