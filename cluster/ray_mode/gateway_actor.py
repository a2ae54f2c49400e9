"""A gateway as a Ray actor: HTTP on one side, the nodes that the directory knows on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass
from functools import partial

import ray

from cluster.http_server import answer_http, bind, served_model, url_of
from cluster.joined_cluster import JoinedCluster
from cluster.node_setup import set_up_logging, use_modules
from cluster.ray_mode.connect_directory import follow_directory
from cluster.ray_mode.member_actor import MemberActor
from cluster.ray_mode.spec import Done, GatewayPlan, Started, pack, unpack
from engine.weights import ModelStore
from kv_transfer.peering import ClusterToken

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0


class GatewayActor(MemberActor["_RunningGateway"]):
    def __init__(self, plan: bytes) -> None:
        super().__init__()
        told = unpack(plan)
        assert isinstance(told, GatewayPlan), told
        self._plan = told
        use_modules(told.spec.module_path)
        set_up_logging(told.gateway_id, told.spec.log_level)

    async def _bring_up(self) -> _RunningGateway:
        return await _start_gateway(self._plan)

    def _describe(self) -> Started:
        """It answers by now."""
        return Started(self._running.url, ray.util.get_node_ip_address(), os.getpid())

    async def run(self) -> str:
        """Returns when it does not answer any more; why."""
        await asyncio.wait({self._running.serving})
        return "it has stopped listening"

    async def drain(self, timeout_s: float | None) -> bytes:
        """Leave what is new to other gateways; returns when all is answered, or after the time."""
        self._running.leaving.set()
        await asyncio.wait({self._running.serving}, timeout=timeout_s)
        return pack(Done())


@dataclass
class _RunningGateway:
    url: str
    cluster: JoinedCluster
    serving: asyncio.Task[None]
    stopping: asyncio.Event
    leaving: asyncio.Event

    async def stop(self) -> None:
        """Requests under way end with an error that says so."""
        self.stopping.set()
        await asyncio.wait({self.serving}, timeout=_STOP_TIMEOUT_S)
        self.serving.cancel()
        await self.cluster.stop()


async def _start_gateway(plan: GatewayPlan) -> _RunningGateway:
    """Raises ConfigError, ModelError: what is not as it has to be on this host."""
    spec = plan.spec
    async with contextlib.AsyncExitStack() as on_failure:
        listener = bind(
            spec.serve, shared=True
        )  # the one that replaces it listens at the same port
        on_failure.callback(listener.close)
        files = await asyncio.to_thread(ModelStore(spec.serve.cache_dir).resolve, spec.serve.model)
        model = await asyncio.to_thread(served_model, files, spec.config)
        cluster = JoinedCluster(
            partial(follow_directory, spec, plan.directory),
            spec.config.engine.fingerprint(spec.fingerprint),
            ClusterToken(spec.token.value),
            spec.config.routing,
            expected=plan.expected,
            meet_s=spec.ray.start_timeout_s,
        )
        await cluster.start()
        on_failure.push_async_callback(cluster.stop)
        ready, stopping, leaving = asyncio.Event(), asyncio.Event(), asyncio.Event()
        answering = answer_http(
            cluster.dispatcher, model, listener, spec.gateway, stopping, ready.set, leaving
        )
        serving = asyncio.create_task(answering)
        await ready.wait()
        on_failure.pop_all()
    url = url_of(spec.serve.host, listener.getsockname()[1])
    logger.info("answers at %s", url)
    return _RunningGateway(url, cluster, serving, stopping, leaving)
