"""A cluster that is changed while clients read their answers: nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.ray_mode.spec import DIRECTORY
from protocol import Role, SamplingParams
from tests.hash_model import expected_tokens, prompt_of
from tests.ray.load import Load, over_http, through
from tests.ray.ray_world import OwnGateway, RayWorld

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
async def gateway(world: RayWorld) -> AsyncIterator[OwnGateway]:
    async with world.own_gateway() as gateway:
        yield gateway


@pytest.fixture
async def load(
    world: RayWorld, gateway: OwnGateway, client: httpx.AsyncClient
) -> AsyncIterator[Load]:
    """Under way. Afterwards all was answered as it had to, and the nodes are at rest."""
    load = Load([through(gateway.dispatcher), over_http(client, world.url, "hash")], seed=0)
    async with load:
        await load.busy()
        yield load
    await gateway.at_rest()
    await gateway.index_matches_nodes()


async def test_a_rolling_restart_loses_no_request(
    world: RayWorld, gateway: OwnGateway, load: Load
) -> None:
    before = world.members()
    await asyncio.to_thread(world.cluster.restart, (), rolling=True)
    after = world.members()
    await gateway.meet(after)
    for name in after.keys() & before.keys() - {DIRECTORY}:
        assert after[name].pid != before[name].pid, f"{name} was not restarted"
        # A gateway's successor has not been restarted at all.
        assert after[name].restarts <= before[name].restarts, f"{name} has died"
    gateways = [{m.pid for m in them.values() if m.kind == "gateway"} for them in (before, after)]
    assert gateways[0].isdisjoint(gateways[1])
    assert len(gateways[1]) == len(gateways[0])
    assert load.num_served > 0


async def test_growing_and_shrinking_loses_no_request(
    world: RayWorld, gateway: OwnGateway, load: Load
) -> None:
    for count in (1, 3, 1):
        targets = {Role.PREFILL: count, Role.DECODE: count}
        await asyncio.to_thread(world.cluster.scale, targets, None)
        members = world.members()
        for role in targets:
            assert sum(member.kind == role for member in members.values()) == count
        await gateway.meet(members)
        await load.more(16)


async def test_a_node_changes_its_role_and_keeps_its_cache(
    world: RayWorld, gateway: OwnGateway, load: Load
) -> None:
    before = world.members()["decode-1"]
    for role in (Role.PREFILL, Role.UNIFIED, Role.DECODE):
        held = (await gateway.statuses())["decode-1"]
        assert held is not None
        await asyncio.to_thread(world.cluster.change_role, "decode-1", role, None)
        members = world.members()
        info = members["decode-1"].info
        assert info is not None
        assert info.role is role
        assert members["decode-1"].pid == before.pid
        await gateway.meet(members)
        now = (await gateway.statuses())["decode-1"]
        assert now is not None
        assert now.blocks.cached + now.blocks.used >= held.blocks.cached / 2
        await load.more(16)


async def test_what_a_drain_does_not_wait_for_goes_on_elsewhere(
    world: RayWorld, gateway: OwnGateway, load: Load
) -> None:
    for name in ("decode-0", "prefill-0", "unified-0"):
        await asyncio.to_thread(world.cluster.drain, name, 0.1)
        status = (await gateway.statuses())[name]
        assert status is not None
        assert status.draining
        assert not status.num_running
        await load.more(16)
        await asyncio.to_thread(world.cluster.undrain, name)
        status = (await gateway.statuses())[name]
        assert status is not None
        assert not status.draining


async def test_a_drain_without_a_deadline_waits_for_all(
    world: RayWorld, gateway: OwnGateway
) -> None:
    prompt = prompt_of(40)
    sampling = SamplingParams(max_tokens=200)
    ask = through(gateway.dispatcher)
    answer = ask(prompt, sampling.max_tokens)
    tokens = [*await anext(answer)]
    while len(tokens) < 2:  # the second one comes from where the request is decoded
        tokens += await anext(answer)
    (busy,) = [i for i, s in (await gateway.statuses()).items() if s and s.num_running]
    draining = asyncio.create_task(asyncio.to_thread(world.cluster.drain, busy, None))
    async for chunk in answer:
        assert not draining.done(), f"{busy} was not waited for"
        tokens += chunk
    await draining
    assert tokens == expected_tokens(prompt, sampling)
    assert not (await gateway.dispatcher.status()).retries
    await asyncio.to_thread(world.cluster.undrain, busy)
    await gateway.at_rest()
