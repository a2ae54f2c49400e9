"""Nodes come, go, come back and change while requests run."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import NodeLost, NoHealthyNode, Overloaded, PauseMode, Role
from router import Dispatcher
from tests.router.scripted_nodes import (
    OUTPUT,
    ScriptedCluster,
    ScriptedNode,
    make_request,
    until,
)
from tests.router.test_dispatch import RandomNode, Reader, finish, read

DRAINS = Overloaded("the node drains", 1.0)


# ---------------------------------------------------------------------- coming


async def test_nodes_come_to_an_empty_cluster() -> None:
    async with ScriptedCluster(0, 0).running() as cluster:
        with pytest.raises(NoHealthyNode):
            await cluster.dispatcher.submit(make_request("early"))
        cluster.join("p7", Role.PREFILL)
        d = cluster.join("d7", Role.DECODE)
        assert cluster.dispatcher.node_ids == {"p7", "d7"}
        stream = await cluster.dispatcher.submit(make_request())
        assert await finish(cluster, attempt=0) == (cluster.prefill[0], d)
        assert await read(stream) == list(OUTPUT)


async def test_a_node_that_comes_is_asked_what_it_has_cached() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        index = cluster.dispatcher._cluster.index
        await until(lambda: not index.needs_snapshot())
        cluster.join("d7", Role.DECODE)
        assert index.needs_snapshot() == {"d7"}
        await until(lambda: not index.needs_snapshot())


async def test_a_new_request_waits_for_the_only_node_that_is_missing() -> None:
    async with ScriptedCluster(1, 0, admission_wait_s=10.0).running() as cluster:
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: len(cluster.dispatcher._room) == 1)
        cluster.join("d7", Role.DECODE)
        stream = await submitting
        await finish(cluster, attempt=0)
        assert await read(stream) == list(OUTPUT)
        assert (await cluster.dispatcher.status()).rejected == {}


async def test_a_new_request_waits_no_longer_than_it_may() -> None:
    async with ScriptedCluster(1, 0, admission_wait_s=0.02).running() as cluster:
        with pytest.raises(NoHealthyNode, match="decode"):
            await cluster.dispatcher.submit(make_request())
        assert (await cluster.dispatcher.status()).rejected == {"no_healthy_node": 1}


async def test_no_more_requests_wait_than_may_be_in_flight() -> None:
    config: dict[str, Any] = {"admission_wait_s": 10.0, "max_inflight_requests": 2}
    async with ScriptedCluster(1, 0, **config).running() as cluster:
        submit = cluster.dispatcher.submit
        waiting = [asyncio.create_task(submit(make_request(f"r{n}"))) for n in range(2)]
        await until(lambda: len(cluster.dispatcher._room) == 2)
        with pytest.raises(Overloaded):
            await submit(make_request("one too many"))
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_whoever_waits_for_a_node_is_told_of_the_end() -> None:
    async with ScriptedCluster(1, 0, admission_wait_s=60.0).running() as cluster:
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: len(cluster.dispatcher._room) == 1)
        await cluster.dispatcher.stop()
        with pytest.raises(NoHealthyNode):
            await submitting


async def test_a_node_that_joins_a_paused_cluster_is_paused() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        await cluster.dispatcher.pause(PauseMode.KEEP)
        late = cluster.join("d7", Role.DECODE)
        await until(lambda: late.orders == ["pause keep"])
        assert await cluster.dispatcher.resume() == {"p0": True, "d0": True, "d7": True}
        later = cluster.join("d8", Role.DECODE)
        await until(lambda: cluster.is_at_rest)
        assert later.orders == []


async def test_a_node_that_is_only_in_the_directory_gets_nothing() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        stranger = ScriptedNode("d7", Role.DECODE)
        cluster.tell(stranger)
        cluster.tell(cluster.decode[0], draining=True)
        with pytest.raises(NoHealthyNode, match="d7: not connected"):
            await cluster.dispatcher.submit(make_request())
        assert not stranger.asked.is_set()


async def test_a_later_generation_gets_nothing_over_the_old_connection() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        (d,) = cluster.decode
        cluster.tell(ScriptedNode("d0", Role.DECODE, generation=5))
        with pytest.raises(NoHealthyNode, match="d0: not connected"):
            await cluster.dispatcher.submit(make_request())
        assert not d.asked.is_set()
        cluster.join("d0", Role.DECODE, generation=5)
        stream = await cluster.dispatcher.submit(make_request())
        await finish(cluster, attempt=0)
        assert await read(stream) == list(OUTPUT)


async def test_records_that_are_lost_do_not_part_us_from_nodes() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        await cluster.dispatcher.status()
        for node in cluster.nodes:
            cluster.directory.deregister(node.info.node_id, generation=0)
        stream = await cluster.dispatcher.submit(make_request())
        await finish(cluster, attempt=0)
        assert await read(stream) == list(OUTPUT)
        cluster.decode[0].lose()
        await until(lambda: cluster.dispatcher.node_ids == {"p0"})
        with pytest.raises(NoHealthyNode):
            await cluster.dispatcher.submit(make_request())


# ---------------------------------------------------------------------- going


@pytest.mark.parametrize("how", ["lost", "removed", "replaced"])
async def test_a_request_goes_on_where_a_node_was(how: str) -> None:
    """The only decode node goes away in the middle, and comes back."""
    async with ScriptedCluster(1, 1, recovery_timeout_s=10.0).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.tokens()
        p.hand_off()
        d.tokens(3, start=1)
        await reader.has(4)
        job = d.job
        if how == "lost":
            d.lose()
        elif how == "removed":
            await cluster.dispatcher.remove_node("d0")
            assert cluster.dispatcher.node_ids == {"p0"}
        if how != "replaced":
            await until(lambda: len(cluster.dispatcher._room) == 1)
        d2 = cluster.join("d0", Role.DECODE, generation=1)
        assert cluster.dispatcher.is_lost(d)
        d.finish(start=4, job=job)  # nobody hears that
        p2, holder = await cluster.pair(attempt=1)
        assert holder is d2
        assert p2.job.emitted == d2.job.emitted == OUTPUT[:4]
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        assert d.jobs == []


async def test_a_connection_that_broke_is_made_again() -> None:
    """The same generation of the node, and another object."""
    async with ScriptedCluster(1, 1, recovery_timeout_s=10.0).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        _, d = await cluster.pair()
        lost = asyncio.create_task(cluster.dispatcher.wait_lost(d))
        d.lose()
        await lost
        await until(lambda: len(cluster.dispatcher._room) == 1)
        d2 = cluster.join("d0", Role.DECODE)
        assert not cluster.dispatcher.is_lost(d2)
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)


async def test_a_node_changes_its_role() -> None:
    async with ScriptedCluster(2, 1).running() as cluster:
        cluster.tell(cluster.decode[0], draining=True)
        changed = cluster.join("p1", Role.DECODE, generation=1)
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await finish(cluster, attempt=0)
        assert (p.info.node_id, d) == ("p0", changed)
        assert await read(stream) == list(OUTPUT)


async def test_to_remove_an_unknown_node_is_harmless() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        await cluster.dispatcher.remove_node("d9")
        assert cluster.dispatcher.node_ids == {"p0", "d0"}


async def test_no_node_comes_in_time() -> None:
    async with ScriptedCluster(1, 1, recovery_timeout_s=0.02).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        _, d = await cluster.pair()
        d.lose()
        with pytest.raises(NoHealthyNode, match="decode"):
            await read(stream)
        assert (await cluster.dispatcher.status()).retries == {
            "node_lost": 1,
            "no_healthy_node": 1,
        }


async def test_the_client_leaves_while_its_request_waits_for_a_node() -> None:
    async with ScriptedCluster(1, 1, recovery_timeout_s=60.0).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        _, d = await cluster.pair()
        d.lose()
        await until(lambda: len(cluster.dispatcher._room) == 1)
        await stream.aclose()
        await until(lambda: cluster.is_at_rest)


# ---------------------------------------------------------------------- draining


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_first_attempt_that_a_draining_node_refuses_goes_elsewhere(role: str) -> None:
    async with ScriptedCluster().running() as cluster:
        likely = (cluster.prefill if role == "prefill" else cluster.decode)[0]
        likely.refuse = DRAINS
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await finish(cluster, attempt=1)
        assert likely.asked.is_set()
        assert likely not in (p, d)
        assert await read(stream) == list(OUTPUT)
        status = await cluster.dispatcher.status()
        assert (status.retries, status.rejected) == ({"overloaded": 1}, {})


async def test_a_request_waits_until_the_only_node_is_back_from_its_drain() -> None:
    async with ScriptedCluster(1, 1, admission_wait_s=10.0).running() as cluster:
        (d,) = cluster.decode
        d.refuse = DRAINS
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: len(cluster.dispatcher._room) == 1)
        cluster.join("d0", Role.DECODE, generation=1)
        stream = await submitting
        await finish(cluster, attempt=1)
        assert await read(stream) == list(OUTPUT)


async def test_a_job_that_a_drain_ends_is_moved_at_once_and_nobody_is_to_blame() -> None:
    """P drains: D, which has its hits, is kept."""
    async with ScriptedCluster(2, 3, max_attempts=1, retry_backoff_s=60.0).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        cluster.tell(d, num_running=30)  # the others have less to do
        p.fail(Overloaded.label)
        p2, d2 = await cluster.pair(attempt=1)
        assert p2 is not p
        assert d2 is d
        await finish(cluster, attempt=1)
        assert await read(stream) == list(OUTPUT)


@pytest.mark.parametrize("fault", ["node_lost", "transfer_failed"])
async def test_d_is_kept_when_p_dies_and_not_when_their_transfer_fails(fault: str) -> None:
    async with ScriptedCluster(2, 2).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        cluster.tell(d, num_running=30)
        p.lose() if fault == "node_lost" else p.fail(fault)
        p2, d2 = await cluster.pair(attempt=1)
        assert p2 is not p
        assert (d2 is d) == (fault == "node_lost")
        await finish(cluster, attempt=1)
        assert await read(stream) == list(OUTPUT)


# ---------------------------------------------------------------------- a host is lost


async def test_what_a_lost_host_had_does_not_come_back_all_at_once() -> None:
    config: dict[str, Any] = {"retry_burst": 3, "retry_share": 0.0, "recovery_timeout_s": 10.0}
    async with ScriptedCluster(2, 2, **config).running() as cluster:
        names = [f"r{n}" for n in range(10)]
        streams = [await cluster.dispatcher.submit(make_request(name)) for name in names]
        cluster.tell(cluster.prefill[1], draining=True)
        cluster.tell(cluster.decode[1], draining=True)
        victims = [job.request.request_id for node in cluster.nodes for job in node.jobs]
        assert set(victims) == set(names)
        for node in cluster.nodes:
            node.lose()
        await until(lambda: len(cluster.dispatcher._room) == 10)
        p = cluster.join("p7", Role.PREFILL)
        d = cluster.join("d7", Role.DECODE)

        def at_work(number: int) -> bool:
            assert len(p.jobs) <= 3
            inside = cluster.dispatcher._gate.num_inside
            return len(p.jobs) == len(d.jobs) == inside == number

        for num_left in range(10, 0, -1):
            await until(partial(at_work, min(3, num_left)))
            job = p.jobs[0]
            p.tokens(job=job)
            p.hand_off(job)
            twin = next(j for j in d.jobs if j.request.request_id == job.request.request_id)
            d.finish(start=1, job=twin)
        assert await asyncio.gather(*map(read, streams)) == [list(OUTPUT)] * 10


# ---------------------------------------------------------------------- silence


async def test_what_a_silent_node_has_goes_on_elsewhere() -> None:
    async with ScriptedCluster(1, 2).running() as cluster:
        cluster.ttl_s = 10.0
        for node in cluster.nodes:
            cluster.tell(node)
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        (other,) = [node for node in cluster.decode if node is not d]
        p.tokens()
        p.hand_off()
        await reader.has(1)
        cluster.dispatcher._roster.get(d.info.node_id).heard_at -= 100.0  # type: ignore[union-attr]
        cluster.now += 11.0
        for node in (p, other):
            cluster.tell(node)
        assert (await cluster.pair(attempt=1))[1] is other
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        await until(lambda: d.cancelled == ["r"])  # for when it wakes
        assert d.info.node_id in cluster.dispatcher.node_ids
        cluster.tell(d)
        cluster.tell(other, draining=True)
        stream = await cluster.dispatcher.submit(make_request("later"))
        assert (await finish(cluster, attempt=0))[1] is d
        assert await read(stream) == list(OUTPUT)


async def test_nodes_of_a_silent_host_are_not_waited_for() -> None:
    """P and D hang both, and neither answers a cancellation."""
    async with ScriptedCluster(2, 2).running() as cluster:
        cluster.ttl_s = 10.0
        for node in cluster.nodes:
            cluster.tell(node)
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        hanging = await cluster.pair()
        for node in hanging:
            node.cancels.clear()
            cluster.dispatcher._roster.get(node.info.node_id).heard_at -= 100.0  # type: ignore[union-attr]
        cluster.now += 11.0
        for node in cluster.nodes:
            if node not in hanging:
                cluster.tell(node)
        others = await cluster.pair(attempt=1)
        assert not set(others) & set(hanging)
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        for node in hanging:
            node.cancels.set()
        await until(lambda: all(node.cancelled == ["r"] for node in hanging))


@pytest.mark.parametrize("alive", ["its stream", "nothing else"])
async def test_a_node_that_is_heard_is_not_given_up(alive: str) -> None:
    """Its heartbeats stop, but its tokens come; or those of all nodes do: the directory is away."""
    async with ScriptedCluster(1, 2).running() as cluster:
        cluster.ttl_s = 10.0
        for node in cluster.nodes:
            cluster.tell(node)
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        cluster.now += 11.0
        if alive == "its stream":
            cluster.tell(p)
        else:
            for member in cluster.dispatcher._roster:
                member.heard_at -= 100.0
        cluster.dispatcher._look()
        p.tokens()
        d.finish(start=1)
        assert await reader.task == list(OUTPUT)
        assert (await cluster.dispatcher.status()).retries == {}


# ---------------------------------------------------------------------- random life


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ("submit", "submit", "submit", "lose", "remove", "restart", "drain", "undrain", "wait")
        ),
        st.integers(0, 5),
    ),
    min_size=5,
    max_size=40,
)


class Life:
    """Nodes that come and go by chance, and requests that must not notice."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        self.cluster = cluster
        self.generation = 0
        self.clients: list[asyncio.Task[list[int]]] = []

    @property
    def dispatcher(self) -> Dispatcher:
        return self.cluster.dispatcher

    async def do(self, operation: str, number: int) -> None:
        node_id = ("p0", "p1", "p2", "d0", "d1", "d2")[number]
        node = next((n for n in self.cluster.nodes if n.info.node_id == node_id), None)
        if operation == "submit":
            self.clients.append(asyncio.create_task(self.live(f"r{len(self.clients)}")))
        elif operation == "wait":
            for _ in range(5 * number):
                await asyncio.sleep(0)
        elif operation == "restart" or node is None:
            self.restart(node_id)
        elif operation == "lose":
            node.lose()
        elif operation == "remove":
            await self.dispatcher.remove_node(node_id)
            self.cluster.forget(node_id)
            self.cluster.directory.deregister(node_id, generation=node.info.generation)
        elif operation == "drain":
            node.refuse = DRAINS
            if number % 2:  # else its status is late
                self.cluster.tell(node, draining=True)
            for job in list(node.jobs):
                node.fail(Overloaded.label, job=job)
        elif operation == "undrain":
            node.refuse = None
            self.cluster.tell(node)

    async def live(self, name: str) -> list[int]:
        return await read(await self.dispatcher.submit(make_request(name)))

    def restart(self, node_id: str) -> None:
        self.generation += 1
        role = Role.PREFILL if node_id[0] == "p" else Role.DECODE
        self.cluster.join(node_id, role, generation=self.generation)


async def live(operations: list[tuple[str, int]]) -> None:
    config: dict[str, Any] = {
        "admission_wait_s": 10.0,
        "recovery_timeout_s": 10.0,
        "retry_backoff_s": 0.0,
        "max_lost_attempts": 1000,
        "retry_burst": 2,
    }
    async with ScriptedCluster(2, 2, **config).running() as cluster:
        life = Life(cluster)
        for operation, number in operations:
            await life.do(operation, number)
            await asyncio.sleep(0)
        life.restart("p0")
        life.restart("d0")
        assert await asyncio.gather(*life.clients) == [list(OUTPUT)] * len(life.clients)
        await until(lambda: cluster.is_at_rest)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(0, 2**32))
def test_nobody_notices_that_nodes_come_and_go(
    operations: list[tuple[str, int]], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.router.scripted_nodes.ScriptedNode", RandomNode)
        patch.setattr(RandomNode, "chance", random.Random(seed))
        patch.setattr(RandomNode, "failure_rate", 0.0)
        asyncio.run(live(operations))


async def test_a_request_that_ends_every_node_is_given_up() -> None:
    async with ScriptedCluster(1, 1, max_lost_attempts=3, recovery_timeout_s=10.0).running() as c:
        stream = await c.dispatcher.submit(make_request())
        for attempt in range(3):
            _, d = await c.pair(attempt)
            d.lose()
            c.join("d0", Role.DECODE, generation=attempt + 1)
        with pytest.raises(NodeLost):
            await read(stream)
