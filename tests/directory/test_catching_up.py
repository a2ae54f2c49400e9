"""Whatever happens to the server, a router that follows the directory ends up with the truth."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from directory import DirectoryError, RedisDirectory, StaleGeneration
from tests.directory.conformance import info, status
from tests.directory.mirror import Mirror, Publisher
from tests.directory.servers import Server, new_prefix

SETTLE_S = 10.0
NODE_IDS = ("d0", "p0")

node_ids = st.sampled_from(NODE_IDS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def test_a_subscriber_has_what_the_publishers_have(server: Server) -> None:
    class Machine(DirectoryMachine):
        the_server = server

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


class DirectoryMachine(RuleBasedStateMachine):
    """Two nodes, each with a directory of its own, and a router with a third one.

    With the long interval they talk to the server only when the machine says so; then much can
    happen between what one writes and another reads.
    """

    the_server: Server

    @initialize(
        interval_s=st.sampled_from([0.01, 30.0]),
        max_entries=st.sampled_from([1, 8192]),
        max_unsent=st.sampled_from([3, 1024]),
    )
    def set_up(self, interval_s: float, max_entries: int, max_unsent: int) -> None:
        self._stack = contextlib.ExitStack()
        self._prefix = new_prefix()
        self._settings = {
            "event_interval_s": interval_s,
            "status_interval_s": interval_s,
            "max_stream_entries": max_entries,
            "max_unsent_batches": max_unsent,
            "io_timeout_s": 0.5,
        }
        self._up = True
        self._publishers = {node_id: Publisher(node_id) for node_id in NODE_IDS}
        self._registered: set[str] = set()
        self._sides: dict[str, RedisDirectory] = {}
        for node_id in NODE_IDS:
            self._start_node(node_id)
        self._router = RedisDirectory(self.the_server.config(self._prefix, **self._settings))
        self._stack.callback(self._router.close)
        self._router.start()
        self._subscription = self._router.subscribe()
        self._mirror = Mirror(self._subscription)
        self.settle()

    def _start_node(self, node_id: str) -> None:
        config = self.the_server.config(self._prefix, follow=False, **self._settings)
        side = RedisDirectory(config)
        self._stack.callback(side.close)
        side.start(need_server=False)
        side.register(info(node_id, generation=self._publishers[node_id].generation), ttl_s=60)
        self._registered.add(node_id)
        self._sides[node_id] = side

    @rule(node_id=node_ids, num_steps=st.integers(1, 6))
    def publish(self, node_id: str, num_steps: int) -> None:
        publisher, side = self._publishers[node_id], self._sides[node_id]
        for step in range(num_steps):
            few = step % 3 != 2 or not publisher.blocks
            side.publish(
                publisher.store() if few else publisher.remove(), generation=publisher.generation
            )

    @rule(node_id=node_ids)
    def heartbeat(self, node_id: str) -> None:
        if node_id in self._registered:
            publisher = self._publishers[node_id]
            beat = status(node_id, num_steps=publisher.sequence)
            self._sides[node_id].heartbeat(beat, generation=publisher.generation)

    @rule(node_id=node_ids)
    def deregister_or_register(self, node_id: str) -> None:
        generation = self._publishers[node_id].generation
        if node_id in self._registered:
            self._sides[node_id].deregister(node_id, generation=generation)
            self._registered.remove(node_id)
        else:
            self._sides[node_id].register(info(node_id, generation=generation), ttl_s=60)
            self._registered.add(node_id)

    @rule(node_id=node_ids)
    def restart_node(self, node_id: str) -> None:
        """The earlier one lives on for a while, as a hung process would."""
        earlier, publisher = self._sides[node_id], self._publishers[node_id]
        generation, was_registered = publisher.generation, node_id in self._registered
        late = publisher.store()
        publisher.restart()
        self._start_node(node_id)
        earlier.publish(late, generation=generation)
        if self._up:
            for side in (earlier, self._sides[node_id], earlier):
                assert side.sync(SETTLE_S)
            with pytest.raises(StaleGeneration if was_registered else DirectoryError):
                earlier.heartbeat(status(node_id), generation=generation)

    @rule()
    @precondition(lambda self: self._up)
    def flush(self) -> None:
        self.the_server.ask("FLUSHALL")

    @rule()
    @precondition(lambda self: self._up)
    def trim(self) -> None:
        for stream in self.the_server.ask("KEYS", "*:events"):
            self.the_server.ask("XTRIM", stream, "MAXLEN", 0)

    @rule(node_id=node_ids, everything=st.booleans())
    @precondition(lambda self: self._up)
    def lose_what_was_just_written(self, node_id: str, everything: bool) -> None:
        self.publish(node_id, 2)
        assert self._sides[node_id].sync(SETTLE_S)
        if everything:
            self.flush()
        else:
            self.trim()

    @rule()
    @precondition(lambda self: self._up)
    def lose_one_key(self) -> None:
        key = self.the_server.ask("RANDOMKEY")
        if key is not None:
            self.the_server.ask("DEL", key)

    @rule()
    @precondition(lambda self: self._up)
    def cut_connections(self) -> None:
        self.the_server.ask("CLIENT", "KILL", "TYPE", "normal")

    @rule()
    @precondition(lambda self: self._up)
    def kill(self) -> None:
        self.the_server.kill()
        self._up = False

    @rule()
    @precondition(lambda self: not self._up)
    def start_empty(self) -> None:
        self.the_server.start_empty()
        self._up = True

    @rule(node_id=node_ids)
    @precondition(lambda self: self._up)
    def write(self, node_id: str) -> None:
        assert self._sides[node_id].sync(SETTLE_S)

    @rule()
    @precondition(lambda self: self._up)
    def read(self) -> None:
        assert self._router.sync(SETTLE_S)

    @rule(ask=st.booleans())
    def follow(self, ask: bool) -> None:
        self._mirror.follow(self._listed())
        if ask:
            self._mirror.ask_snapshots(list(self._publishers.values()))

    def _listed(self) -> dict[str, int]:
        return {r.info.node_id: r.info.generation for r in self._router.nodes()}

    @rule()
    @precondition(lambda self: self._up)
    def settle(self) -> None:
        for side in self._sides.values():
            assert side.sync(SETTLE_S)
        assert self._router.sync(SETTLE_S)
        listed = self._listed()
        self._mirror.follow(listed)
        self._mirror.ask_snapshots(list(self._publishers.values()))
        for node_id in self._registered:
            publisher = self._publishers[node_id]
            assert listed[node_id] == publisher.generation
            if publisher.sequence:
                assert self._mirror.blocks(node_id) == publisher.blocks

    def teardown(self) -> None:
        if not hasattr(self, "_stack"):
            return
        with self._stack:
            if not self._up:
                self.start_empty()
            self.settle()
