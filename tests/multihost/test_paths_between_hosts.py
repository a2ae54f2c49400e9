"""Prefill and decode nodes on two hosts, of which a path between them may lose all that is sent.

h1 ══ h2      KV, and the hand-offs' own messages
here ── h1    jobs and tokens; from h0 too
here ── h2
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from protocol import NodeStatus, TokenStream, TransferFailed
from tests.multihost.host_cluster import (
    MAX_TOKENS,
    HostCluster,
    eventually,
    host_spec,
)
from tests.multihost.host_network import HERE
from tests.multihost.ray_hosts import RayHosts
from tests.process_cluster import is_busy
from tests.ray.ray_world import OwnGateway

SEEDS = 5  # with --all-faults

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.timeout(300)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        many = metafunc.config.getoption("--all-faults")
        metafunc.parametrize("seed", range(SEEDS if many else 1))


@pytest.fixture(scope="module")
def shared_pairs(hosts: RayHosts, model_dir: Path) -> Iterator[HostCluster]:
    with HostCluster.up(hosts, host_spec(hosts, model_dir)) as cluster:
        yield cluster


@pytest.fixture
def pairs(shared_pairs: HostCluster) -> Iterator[HostCluster]:
    """Prefill and decode nodes on both h1 and h2."""
    yield shared_pairs
    shared_pairs.network.heal_all()


@pytest.fixture(scope="module")
def shared_apart(hosts: RayHosts, model_dir: Path) -> Iterator[HostCluster]:
    transfer = {"on_transfer_failure": "recompute", "reserve_timeout_s": 3}
    spec = host_spec(hosts, model_dir, prefill=1, decode=1, separate=True, transfer=transfer)
    with HostCluster.up(hosts, spec) as cluster:
        yield cluster


@pytest.fixture
def apart(shared_apart: HostCluster) -> Iterator[HostCluster]:
    """A prefill node on h1, a decode node on h2, which computes what it does not get."""
    yield shared_apart
    shared_apart.network.heal_all()


async def test_a_prefill_node_hands_off_to_another_host(
    apart: HostCluster, client: httpx.AsyncClient
) -> None:
    homes = await apart.homes()
    assert homes == {"directory": "h0", "gateway-0": "h0", "prefill-0": "h1", "decode-0": "h2"}
    async with apart.own_gateway() as gateway:
        async with apart.load(gateway, client) as load:
            await load.more(24)
        status = (await gateway.at_rest())["decode-0"]
    assert status.transfers.committed >= 24
    assert status.num_prompt_tokens_loaded > 0
    assert status.num_prompt_tokens_computed == 0
    assert not await _maps_pool_of(apart, "prefill-0", "decode-0")


async def test_nodes_of_a_host_share_memory_and_others_do_not(
    pairs: HostCluster, client: httpx.AsyncClient
) -> None:
    homes = await pairs.homes()
    assert (homes["prefill-0"], homes["decode-1"]) == ("h1", "h1")
    assert (homes["prefill-1"], homes["decode-0"]) == ("h2", "h2")
    async with pairs.own_gateway() as gateway:
        for prefill in ("prefill-0", "prefill-1"):
            await _hands_off(pairs, gateway, client, prefill, "decode-0")
    assert await _maps_pool_of(pairs, "prefill-1", "decode-0")
    assert not await _maps_pool_of(pairs, "prefill-0", "decode-0")


async def _maps_pool_of(cluster: HostCluster, one: str, other: str) -> bool:
    """Whether a node has the memory of another one's blocks in its own."""
    return bool(await _pools_in(cluster, one) & await _pools_in(cluster, other))


async def _pools_in(cluster: HostCluster, name: str) -> set[tuple[str, str]]:
    """The files in memory that a node has, as the kernel numbers them."""
    member, home = (await cluster.members())[name], (await cluster.homes())[name]
    maps = cluster.network.hosts[home].path(Path(f"/proc/{member.pid}/maps")).read_text()
    return set(re.findall(r"(\S+) (\d+) +/memfd:", maps))


async def test_another_pair_does_what_one_cannot(
    pairs: HostCluster, client: httpx.AsyncClient, seed: int
) -> None:
    async with pairs.own_gateway() as gateway:
        async with pairs.load(gateway, client, seed) as load:
            await load.busy()
            with pairs.network.without("h1", "h2"):
                await eventually(lambda: _met_the_cut(gateway), "no request met the cut")
                await load.more(40)
            await load.more(16)
        await gateway.at_rest()
        await _hands_off(pairs, gateway, client, "prefill-0", "decode-0")
        await _hands_off(pairs, gateway, client, "prefill-1", "decode-1")


async def test_a_decode_node_computes_what_does_not_arrive(
    apart: HostCluster, client: httpx.AsyncClient, seed: int
) -> None:
    async with apart.own_gateway() as gateway:
        before = (await gateway.at_rest())["decode-0"]
        async with apart.load(gateway, client, seed) as load:
            await load.busy()
            with apart.network.without("h1", "h2"):
                await load.more(24)
        after = (await gateway.at_rest())["decode-0"]
        assert after.num_prompt_tokens_computed > before.num_prompt_tokens_computed
        await _hands_off(apart, gateway, client, "prefill-0", "decode-0")


async def _hands_off(
    cluster: HostCluster,
    gateway: OwnGateway,
    client: httpx.AsyncClient,
    prefill: str,
    decode: str,
) -> None:
    """With no other pair to help, and nothing going wrong.

    But the first ones may find that one end has lost a connection, which the other still has.
    """
    nodes = {name for name, member in (await cluster.members()).items() if member.info is not None}
    async with cluster.drained(*nodes - {prefill, decode}):
        async with cluster.load(gateway, client) as load:
            await load.more(1)
        before = (await gateway.at_rest())[decode]
        async with cluster.load(gateway, client) as load:
            await load.more(12)
    after = (await gateway.at_rest())[decode]
    assert after.num_prompt_tokens_loaded > before.num_prompt_tokens_loaded
    assert _failures(after) == _failures(before)


def _failures(status: NodeStatus) -> dict[str, int]:
    """Hand-offs to this node that went wrong, rather than being given up by a client."""
    return {why: number for why, number in status.transfers.reasons.items() if why != "cancelled"}


async def test_a_gateway_that_is_cut_off_goes_elsewhere(
    pairs: HostCluster, client: httpx.AsyncClient
) -> None:
    async with pairs.own_gateway() as gateway:
        async with pairs.load(gateway, client) as load:
            await load.busy()
            with pairs.network.without(HERE, "h2"):
                await load.more(40)
                await eventually(lambda: _lost(gateway), "its node was never lost")
            await load.stop()
            await gateway.meet(await pairs.members())
        await gateway.at_rest()


async def test_a_node_frees_what_a_gateway_has_that_is_cut_off(pairs: HostCluster) -> None:
    async with pairs.own_gateway() as gateway:
        request = pairs.long_request()
        async with pairs.drained("decode-1"):
            stream = await gateway.dispatcher.submit(request)
            async with contextlib.aclosing(stream):
                await _first_tokens(stream)
                before = (await gateway.statuses())["decode-0"]
                assert before is not None
                assert before.num_running == 1
                with pairs.network.without(HERE, "h2"):
                    await eventually(lambda: _at_rest(pairs, "decode-0"), "it was not freed")
                await gateway.meet(await pairs.members())
        after = (await gateway.at_rest())["decode-0"]
        assert after.num_generated_tokens - before.num_generated_tokens < MAX_TOKENS / 2


async def _first_tokens(stream: TokenStream) -> None:
    """Until the decode node has made some."""
    num_tokens = 0
    async for chunk in stream:
        num_tokens += len(chunk.token_ids)
        if num_tokens >= 3:
            return


async def _met_the_cut(gateway: OwnGateway) -> bool:
    """A hand-off has failed, and its request is on its way elsewhere."""
    return (await gateway.dispatcher.status()).retries.get(TransferFailed.label, 0) > 0


async def _lost(gateway: OwnGateway) -> bool:
    return not {"prefill-1", "decode-0"} & gateway.dispatcher.node_ids


async def _at_rest(cluster: HostCluster, *nodes: str) -> bool:
    """As these nodes have told the directory."""
    members = await cluster.members()
    statuses = [members[node].status for node in nodes]
    return all(status is not None and not is_busy(status) for status in statuses)
