"""Who is connected, whatever the directory tells and connections do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

import pytest

from cluster.membership import Membership
from directory import MemoryDirectory
from protocol import NodeInfo, NodeLost, Role, TokenStream
from router import Dispatcher, RouterConfig
from tests.router.nodes import FINGERPRINT, make_info, make_status
from tests.router.scripted_nodes import OUTPUT, ScriptedNode, make_request, until

TTL_S = 10.0


class World:
    """A directory, a dispatcher that follows it, and connections that a test makes and breaks."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.directory = MemoryDirectory(clock=lambda: self.now)
        self.dispatcher = Dispatcher(
            self.directory,
            FINGERPRINT,
            config=RouterConfig(recovery_timeout_s=20.0, retry_backoff_s=0.001),
        )
        self.membership = Membership(
            self.directory,
            self.dispatcher,
            self._connect,
            fingerprint=FINGERPRINT,
            poll_s=0.002,
            chance=random.Random(0),
        )
        self.connections: list[ScriptedNode] = []
        self.dialled: list[NodeInfo] = []
        self.unreachable: set[str] = set()
        self.answers = asyncio.Event()  # dials come to an end while this is set
        self.answers.set()

    async def _connect(self, info: NodeInfo) -> ScriptedNode:
        self.dialled.append(info)
        await self.answers.wait()
        if info.node_id in self.unreachable:
            raise NodeLost(f"nobody is at {info.service}")
        node = ScriptedNode(info.node_id, info.role)
        node.info = info
        self.connections.append(node)
        return node

    def register(self, node_id: str, generation: int = 0, **changes: object) -> NodeInfo:
        role = Role.PREFILL if node_id[0] == "p" else Role.DECODE
        values = {"service": f"unix:{node_id}", "generation": generation} | changes
        info = make_info(node_id, role, **values)
        self.directory.register(info, ttl_s=TTL_S)
        self.directory.heartbeat(make_status(info), generation=generation)
        return info

    def connection(self, node_id: str) -> ScriptedNode:
        """The latest one to this node."""
        return [node for node in self.connections if node.info.node_id == node_id][-1]

    async def connected(self, *node_ids: str) -> None:
        await until(lambda: self.dispatcher.node_ids == set(node_ids))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        before = asyncio.all_tasks()
        await self.dispatcher.start()
        await self.membership.start()
        try:
            yield self
        finally:
            await self.dispatcher.stop()
            await self.membership.stop()
        await until(lambda: asyncio.all_tasks() == before)
        assert all(node.closed for node in self.connections)


async def read(stream: TokenStream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


async def test_nodes_that_are_there_and_nodes_that_come() -> None:
    world = World()
    world.register("p0")
    async with world.running():
        await world.connected("p0")
        world.register("d0")
        await world.connected("p0", "d0")
        stream = await world.dispatcher.submit(make_request())
        p, d = world.connection("p0"), world.connection("d0")
        p.tokens()
        d.finish(start=1)
        assert await read(stream) == list(OUTPUT)
        assert len(world.dialled) == 2


async def test_all_are_dialled_at_the_same_time() -> None:
    async with World().running() as world:
        world.answers.clear()
        for n in range(5):
            world.register(f"p{n}")
        await until(lambda: len(world.dialled) == 5)
        assert world.dispatcher.node_ids == frozenset()
        world.answers.set()
        await world.connected("p0", "p1", "p2", "p3", "p4")


async def test_nodes_without_an_address_or_with_another_model_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with World().running() as world:
        world.register("d0", service="")
        world.register("d1", fingerprint="another")
        world.register("p0")
        await world.connected("p0")
        for generation in range(3):  # each is seen by a poll of its own
            world.register("p1", generation)
            await until(
                lambda generation=generation: (  # type: ignore[misc]
                    world.dialled[-1].generation == generation and world.dialled[-1].node_id == "p1"
                )
            )
        assert {info.node_id for info in world.dialled} == {"p0", "p1"}
        warnings = [r.message for r in caplog.records if "serves another model" in r.message]
        assert len(warnings) == 1
        assert "d1" in warnings[0]


async def test_a_broken_connection_is_made_again_and_requests_go_on() -> None:
    async with World().running() as world:
        world.register("p0")
        world.register("d0")
        await world.connected("p0", "d0")
        stream = await world.dispatcher.submit(make_request())
        broken = world.connection("d0")
        broken.lose()
        await until(lambda: world.connection("d0") is not broken)
        p, d = world.connection("p0"), world.connection("d0")
        await until(lambda: bool(p.jobs and d.jobs and d.job.attempt == 1))
        assert broken.closed
        p.tokens()
        d.finish(start=1)
        assert await read(stream) == list(OUTPUT)


async def test_a_node_that_cannot_be_reached_is_dialled_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with World().running() as world:
        world.unreachable.add("p0")
        world.register("p0")
        await until(lambda: len(world.dialled) >= 3)
        world.unreachable.clear()
        await world.connected("p0")
        assert [r.message for r in caplog.records if "cannot be reached" in r.message] == [
            "node p0 cannot be reached: nobody is at unix:p0"
        ]


async def test_a_later_generation_takes_the_place_of_the_earlier_one() -> None:
    async with World().running() as world:
        world.register("d0")
        await world.connected("d0")
        first = world.connection("d0")
        world.register("d0", generation=7)
        await until(lambda: world.connection("d0") is not first)
        await world.connected("d0")
        assert first.closed
        assert world.connection("d0").info.generation == 7


async def test_a_node_that_leaves_is_forgotten() -> None:
    async with World().running() as world:
        world.register("p0")
        world.register("d0")
        await world.connected("p0", "d0")
        world.directory.deregister("d0", generation=0)
        world.connection("d0").lose()  # its service is closed
        await until(lambda: not world.membership._links.keys() - {"p0"})
        await until(lambda: world.dispatcher._roster.get("d0") is None)
        status = await world.dispatcher.status()
        assert [report.info.node_id for report in status.nodes] == ["p0"]
        assert len(world.dialled) == 2


async def test_records_that_are_lost_part_nobody() -> None:
    async with World().running() as world:
        world.register("p0")
        world.register("d0")
        await world.connected("p0", "d0")
        for node_id in ("p0", "d0"):
            world.directory.deregister(node_id, generation=0)
        world.register("p1")  # when this one is here, the others have been missed
        await world.connected("p0", "p1", "d0")
        for node_id in ("p0", "d0"):
            world.register(node_id)
        world.register("p2")
        await world.connected("p0", "p1", "p2", "d0")
        assert len(world.dialled) == 4
        assert not any(node.closed for node in world.connections)


async def test_a_dead_node_is_not_dialled_until_it_lives() -> None:
    async with World().running() as world:
        world.register("p0")
        await world.connected("p0")
        world.now += TTL_S + 1.0
        world.register("p1")
        await world.connected("p0", "p1")  # silent, but connected
        world.connection("p0").lose()
        await until(lambda: "p0" not in world.membership._links)
        num_dialled = len(world.dialled)
        world.register("p2")
        await world.connected("p1", "p2")
        assert len(world.dialled) == num_dialled + 1
        world.register("p0")
        await world.connected("p0", "p1", "p2")


async def test_stop_while_nobody_answers() -> None:
    world = World()
    async with world.running():
        world.answers.clear()
        world.register("p0")
        await until(lambda: bool(world.dialled))
    assert world.connections == []
