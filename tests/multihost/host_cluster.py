"""A cluster of hash-model nodes over several hosts, and a gateway of this process's own beside it.

here   pytest, a gateway of its own
h0     head of Ray, controller, directory, a gateway; no node
h1     prefill-0, decode-0          (or only prefill-0)
h2     prefill-1, decode-1          (or only decode-0)
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from cluster import TransportChoice
from cluster.connected_node import connect_node
from cluster.keepalive import KeepaliveConfig
from cluster.membership import Membership
from cluster.ray_config import Placement, RayConfig
from cluster.ray_mode.connect_directory import follow_directory
from cluster.ray_mode.spec import MemberReport, Spec
from kv_transfer.peering import ClusterToken
from protocol import GenerationRequest, SamplingParams
from router import Dispatcher, RouterConfig
from tests.multihost.ray_hosts import HEAD, RayHosts, RemoteDriver
from tests.ray.load import Load, over_http, through
from tests.ray.ray_world import OwnGateway, make_spec

# Each pair in its turn, whatever is known of it: so a path that is cut is met again and again. For
# that, the numbers of prefill and decode nodes have no divisor in common.
ROUTER = RouterConfig(policy="round_robin", admission_wait_s=30.0)
NUM_BLOCKS = 192  # of 16 tokens
MAX_TOKENS = 2048  # of a request, which a node computes in 40 s
_KEEPALIVE = KeepaliveConfig(ping_s=0.5, silence_s=3.0)


def host_spec(
    hosts: RayHosts,
    model: Path,
    *,
    prefill: int = 3,
    decode: int = 2,
    separate: bool = False,
    transfer: Mapping[str, Any] | None = None,
) -> Spec:
    """`transfer`: settings of `TransferConfig`."""
    config = RayConfig(
        address=hosts.address,
        placement=Placement.SPREAD,
        separate_roles=separate,
        placement_timeout_s=30,
        health_interval_s=0.5,
        health_timeout_s=8,
        start_timeout_s=90,
    )
    spec = make_spec(None, model, prefill=prefill, decode=decode, gateways=1, ray=config)
    wished = {
        "transport": TransportChoice.AUTO,
        "bind": "auto",
        "transfer_timeout_s": 3,
        **(transfer or {}),
    }
    return msgspec.structs.replace(
        spec,
        config=replace(
            spec.config,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_TOKENS,
            router=ROUTER,
            transfer=replace(spec.config.transfer, **wished),
        ),
        serve=replace(spec.serve, host=hosts.network.address(HEAD)),
    )


class HostCluster:
    """One that is up."""

    def __init__(self, hosts: RayHosts, spec: Spec, driver: RemoteDriver) -> None:
        self.hosts = hosts
        self.network = hosts.network
        self.spec = spec
        self.driver = driver

    @classmethod
    @contextlib.contextmanager
    def up(cls, hosts: RayHosts, spec: Spec) -> Iterator[HostCluster]:
        """Raises Refused: what keeps it from coming up."""
        with hosts.up(spec) as driver:
            yield cls(hosts, spec, driver)

    @property
    def url(self) -> str:
        return f"http://{self.spec.serve.host}:{self.spec.serve.port}/v1"

    def load(self, gateway: OwnGateway, client: httpx.AsyncClient, seed: int = 0) -> Load:
        """Half of the clients ask here, the others on the head's host."""
        ways = [through(gateway.dispatcher), over_http(client, self.url, "hash")]
        return Load(ways, seed, concurrency=8)

    @contextlib.asynccontextmanager
    async def drained(self, *nodes: str) -> AsyncIterator[None]:
        """These take no requests meanwhile."""
        for node in nodes:
            await asyncio.to_thread(self.driver.order, "drain", node=node)
        try:
            yield
        finally:
            for node in nodes:
                await asyncio.to_thread(self.driver.order, "undrain", node=node)

    async def members(self) -> Mapping[str, MemberReport]:
        return await asyncio.to_thread(self.driver.members)

    async def homes(self) -> dict[str, str]:
        """The host of each member."""
        names = {host.address: name for name, host in self.network.hosts.items()}
        return {name: names[member.host] for name, member in (await self.members()).items()}

    @contextlib.asynccontextmanager
    async def own_gateway(self) -> AsyncIterator[OwnGateway]:
        """In this process, connected to all nodes."""
        address = await asyncio.to_thread(self.driver.directory)
        connecting = partial(follow_directory, self.spec, address, need_server=True)
        directory = await asyncio.to_thread(connecting)
        dispatcher = Dispatcher(directory, self.spec.fingerprint, config=self.spec.config.routing)
        token = ClusterToken(self.spec.token.value)
        dial = partial(connect_node, token=token, keepalive=_KEEPALIVE)
        membership = Membership(directory, dispatcher, dial, fingerprint=self.spec.fingerprint)
        try:
            await dispatcher.start()
            await membership.start()
            gateway = OwnGateway(dispatcher, directory)
            await gateway.meet(await self.members())
            yield gateway
        finally:
            await membership.stop()
            await dispatcher.stop()
            await asyncio.to_thread(directory.close)

    def long_request(self) -> GenerationRequest:
        """One that runs for longer than anybody waits here."""
        return GenerationRequest(
            request_id=f"long-{secrets.token_hex(4)}",
            prompt_token_ids=tuple(range(2, 42)),
            sampling=SamplingParams(max_tokens=MAX_TOKENS - 40),
            arrival_time=time.time(),
        )


async def eventually(
    condition: Callable[[], Awaitable[bool]], what: str, within_s: float = 30.0
) -> None:
    """Raises AssertionError with `what`: it does not come true."""
    try:
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # nobody tells of what happens in other processes
    except TimeoutError:
        raise AssertionError(what) from None
