"""What comes after an end: who takes the place, who is refused, and what is remembered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from cluster.ray_mode.connect_directory import tell_directory
from cluster.ray_mode.hosts import Host
from cluster.ray_mode.memory import MemoryStore
from cluster.ray_mode.places import living_hosts
from cluster.ray_mode.preflight import check_hosts
from directory import StaleGeneration
from protocol import NodeLost, Role
from tests.ray.load import GatewayGone, Load, over_http, through
from tests.ray.ray_world import OwnGateway, RayWorld, until


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        many = metafunc.config.getoption("--all-faults")
        metafunc.parametrize("name", ["decode-0", *["prefill-0", "unified-0"] * many])


pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
async def gateway(world: RayWorld) -> AsyncIterator[OwnGateway]:
    async with world.own_gateway() as gateway:
        yield gateway


@pytest.fixture
async def load(
    world: RayWorld, gateway: OwnGateway, client: httpx.AsyncClient
) -> AsyncIterator[Load]:
    load = Load([through(gateway.dispatcher), over_http(client, world.url, "hash")], seed=0)
    async with load:
        await load.busy()
        yield load
    await gateway.at_rest()
    await gateway.index_matches_nodes()


async def test_who_was_replaced_is_refused(world: RayWorld, gateway: OwnGateway) -> None:
    old = world.members()["prefill-0"].info
    status = (await gateway.statuses())["prefill-0"]
    assert old is not None
    assert status is not None
    await world.whole_again(await asyncio.to_thread(world.kill, "prefill-0"), gateway)
    memory = MemoryStore(world.spec.name).load()
    assert memory is not None
    late = tell_directory(world.spec, memory.directory)
    try:
        assert await asyncio.to_thread(late.sync, 10)
        with pytest.raises(StaleGeneration):
            await asyncio.to_thread(late.register, old, ttl_s=60)
        with pytest.raises(StaleGeneration):
            late.heartbeat(status, generation=old.generation)
    finally:
        await asyncio.to_thread(late.close)
    (now,) = [r.info for r in gateway.directory.nodes() if r.info.node_id == "prefill-0"]
    assert now.generation > old.generation


async def test_a_node_that_hangs_is_replaced(
    world: RayWorld, gateway: OwnGateway, load: Load, name: str
) -> None:
    (hung,) = world.stop(name)
    await world.whole_again([hung], gateway)
    await until(lambda: _has_ended(hung.pid), f"{name} is still there as {hung.pid}", within_s=20)
    await load.more(16)


async def test_a_node_that_wakes_too_late_does_no_harm(
    world: RayWorld, gateway: OwnGateway, load: Load
) -> None:
    """What it had goes on elsewhere, and what it still says of that is of the past."""

    async def moved() -> bool:
        return bool((await gateway.dispatcher.status()).retries.get(NodeLost.label))

    (hung,) = world.stop("decode-0")
    await until(moved, "nothing goes on elsewhere", within_s=20)
    world.go_on(hung)
    await load.more(32)
    await world.whole_again([], gateway)


async def test_a_node_that_wakes_in_time_goes_on(
    world: RayWorld, gateway: OwnGateway, load: Load
) -> None:
    before = world.members()["decode-0"]
    (hung,) = world.stop("decode-0")
    await asyncio.sleep(1.0)  # as long as it hangs
    world.go_on(hung)
    await load.more(32)
    await gateway.meet(world.members())
    assert world.members()["decode-0"].pid == before.pid


async def test_the_controller_is_replaced_and_remembers(
    world: RayWorld, gateway: OwnGateway, load: Load
) -> None:
    await asyncio.to_thread(world.cluster.scale, {Role.PREFILL: 3, Role.UNIFIED: 0}, None)
    before = world.members()
    killed = await asyncio.to_thread(world.kill, "controller")
    await world.whole_again(killed, gateway)
    after = world.members()
    assert {n: m.pid for n, m in after.items()} == {n: m.pid for n, m in before.items()}
    assert world.report().targets == {Role.PREFILL: 3, Role.DECODE: 2}
    await load.more(16)
    await asyncio.to_thread(world.cluster.scale, {Role.PREFILL: 2, Role.UNIFIED: 1}, None)
    await gateway.meet(world.members())


async def test_the_controller_is_killed_while_a_node_is_away(
    world: RayWorld, gateway: OwnGateway, load: Load
) -> None:
    killed = await asyncio.to_thread(world.kill, "controller", "decode-1")
    await world.whole_again(killed, gateway)
    await load.more(16)


async def test_a_host_is_lost(world: RayWorld, gateway: OwnGateway, load: Load) -> None:
    load.gateways_die = True
    names = ("prefill-0", "decode-0", "unified-0", world.gateways[0], "directory", "controller")
    killed = await asyncio.to_thread(world.kill, *names)
    await world.whole_again(killed, gateway)
    await load.more(16)


def test_a_host_may_leave_while_it_is_looked_at(
    world: RayWorld, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Host("ab" * 28, "198.51.100.9", {}, {})
    check_hosts(world.spec, [gone, *living_hosts()])
    assert f"{gone.address} has just left Ray" in caplog.text


async def test_all_nodes_are_lost_at_once(world: RayWorld, gateway: OwnGateway, load: Load) -> None:
    names = [name for name, member in world.members().items() if member.info is not None]
    killed = await asyncio.to_thread(world.kill, *names)
    await world.whole_again(killed, gateway)
    await load.more(16)


async def test_what_clients_of_a_lost_gateway_had_is_freed(
    world: RayWorld, gateway: OwnGateway, client: httpx.AsyncClient
) -> None:
    num_tokens = 500
    before = await _num_generated(gateway)
    ask = over_http(client, world.url, "hash")
    prompts = [[number, 2, 3] for number in range(2, 14)]
    begun = asyncio.Event()
    killed = await asyncio.to_thread(world.aim_at, *world.gateways)
    async with asyncio.TaskGroup() as group:
        clients = [
            group.create_task(_is_cut_off(ask(prompt, num_tokens), begun)) for prompt in prompts
        ]
        await begun.wait()
        world.send(signal.SIGKILL, killed)
    assert any(client.result() for client in clients), "all answers were there already"
    await gateway.at_rest()
    generated = await _num_generated(gateway) - before
    assert generated < len(prompts) * num_tokens / 2, "nodes went on, though nobody listens"
    await world.whole_again(killed, gateway)


async def _is_cut_off(answer: AsyncIterator[Sequence[int]], begun: asyncio.Event) -> bool:
    """Whether its gateway was gone before its end."""
    try:
        async for _ in answer:
            begun.set()
    except GatewayGone:
        return True
    return False


async def _num_generated(gateway: OwnGateway) -> int:
    return sum(s.num_generated_tokens for s in (await gateway.statuses()).values() if s)


async def _has_ended(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")  # noqa: ASYNC240 - it is no disk
