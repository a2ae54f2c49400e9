"""Every state of a hand-off × everything that can go wrong × every transport.

Nodes are processes with `shm` and `nixl`, which are killed and stopped for good; with `memory` a
node is killed by closing its transport and ending its engine, and stopped by holding its thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from cluster import TransportChoice
from tests.faults.cases import ALL, Case, Harm, State
from tests.faults.fault_cluster import Shape
from tests.faults.world import Walk, World, world_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

_CASE_TIMEOUT_S = 60.0

TRANSPORTS = (TransportChoice.MEMORY, TransportChoice.SHM, TransportChoice.NIXL)


class _Group(NamedTuple):
    """Cases that share a cluster: those that kill leave fewer nodes to the next."""

    shape: Shape
    cases: list[Case]


_NUM_VICTIMS = len(State) + 1
_KILLS = {Harm.P_KILLED: Shape(_NUM_VICTIMS, 1), Harm.D_KILLED: Shape(1, _NUM_VICTIMS)}

_GROUPS = {
    "test_nobody_is_killed": _Group(Shape(2, 2), [c for c in ALL if c.harm not in _KILLS]),
    "test_p_is_killed": _Group(_KILLS[Harm.P_KILLED], [c for c in ALL if c.harm is Harm.P_KILLED]),
    "test_d_is_killed": _Group(_KILLS[Harm.D_KILLED], [c for c in ALL if c.harm is Harm.D_KILLED]),
}


class _Setting(NamedTuple):
    """Of one cluster."""

    transport: TransportChoice
    seed: int
    group: str


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    group = metafunc.function.__name__
    seeds = range(5) if metafunc.config.getoption("--all-faults") else range(1)
    settings = [_Setting(transport, seed, group) for transport in TRANSPORTS for seed in seeds]
    ids = [f"{setting.transport}-{setting.seed}" for setting in settings]
    # Of the module, so that the cases of one cluster follow each other.
    metafunc.parametrize("world", settings, indirect=True, scope="module", ids=ids)
    metafunc.parametrize("case", _GROUPS[group].cases, ids=str)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    setting: _Setting = request.param
    group, directory = _GROUPS[setting.group], tmp_path_factory.mktemp("faults")
    running = world_of(setting.transport, group.cases, setting.seed, directory, group.shape)
    async with running as world:
        yield world


async def test_nobody_is_killed(world: World, case: Case) -> None:
    await _walk(world, case)


async def test_p_is_killed(world: World, case: Case) -> None:
    await _walk(world, case)


async def test_d_is_killed(world: World, case: Case) -> None:
    await _walk(world, case)


async def _walk(world: World, case: Case) -> None:
    async with asyncio.timeout(_CASE_TIMEOUT_S):
        await Walk(world, case).run()
