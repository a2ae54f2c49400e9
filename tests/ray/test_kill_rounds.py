"""Processes of all kinds are killed at any moment while 16 clients read their answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.ray.load import Load, over_http, through
from tests.ray.ray_world import OwnGateway, RayWorld

KINDS = ("prefill", "decode", "unified", "gateway", "directory", "controller")
NUM_ROUNDS = 12  # of a test: each kind twice
MANY_TESTS = 17  # with --all-faults; 204 rounds
LATEST_S = 0.8  # after all clients have had a token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        many = metafunc.config.getoption("--all-faults")
        metafunc.parametrize("seed", range(MANY_TESTS if many else 1))


async def test_every_request_survives_whatever_is_killed(
    world: RayWorld, client: httpx.AsyncClient, seed: int
) -> None:
    chance = random.Random(seed)
    async with world.own_gateway() as gateway:
        ways = [through(gateway.dispatcher), over_http(client, world.url, "hash")]
        load = Load(ways, seed)
        for number, kind in enumerate(_kinds(chance)):
            name = chance.choice(_members(world, kind))
            try:
                await _round(world, gateway, load, name, chance.uniform(0, LATEST_S))
            except BaseException as error:
                error.add_note(f"seed {seed}, round {number}: {name} was killed")
                raise
        await gateway.index_matches_nodes()


def _kinds(chance: random.Random) -> Iterator[str]:
    """Each as often as the others, in any order."""
    kinds = [*KINDS] * (NUM_ROUNDS // len(KINDS))
    chance.shuffle(kinds)
    yield from kinds


def _members(world: RayWorld, kind: str) -> list[str]:
    names = sorted(world.members())
    return [name for name in [*names, "controller"] if name.startswith(kind)]


async def _round(
    world: RayWorld, gateway: OwnGateway, load: Load, name: str, after_s: float
) -> None:
    load.gateways_die = name.startswith("gateway")
    async with load:
        await load.busy()
        await asyncio.sleep(after_s)  # any moment is as good as another
        killed = await asyncio.to_thread(world.kill, name)
        await world.whole_again(killed, gateway)
    await gateway.at_rest()
