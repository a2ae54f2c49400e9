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
from cluster.ray_mode.actor_process import end_process
from cluster.ray_mode.connect_directory import follow_directory
from cluster.ray_mode.spec import Done, Failed, GatewayPlan, Started, pack, unpack
from engine.weights import ModelStore
from kv_transfer.peering import ClusterToken
from protocol import KvrelayError

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0


class GatewayActor:
    """Its methods are for the controller; they answer with packed messages, never with objects."""

    def __init__(self, plan: bytes) -> None:
        """Quick, so that whoever has made it can ask it things; `start` takes the time."""
        told = unpack(plan)
        assert isinstance(told, GatewayPlan), told
        self._plan = told
        self._starting = asyncio.Lock()
        self._running: _RunningGateway | None = None
        use_modules(told.spec.module_path)
        set_up_logging(told.gateway_id, told.spec.log_level)

    async def start(self) -> bytes:
        """Started once it answers, or Failed. Asked again, it says the same."""
        async with self._starting:
            try:
                if self._running is None:
                    self._running = await _start_gateway(self._plan)
            except (KvrelayError, TimeoutError) as error:
                return pack(Failed.of(error))
        return pack(Started(self._running.url, ray.util.get_node_ip_address(), os.getpid()))

    async def run(self) -> str:
        """Returns when it does not answer any more; why."""
        assert self._running is not None
        await asyncio.wait({self._running.serving})
        return "it has stopped listening"

    async def ping(self) -> None:
        """Whoever gets an answer knows that this process is alive, and has time."""

    async def drain(self, timeout_s: float | None) -> bytes:
        """Leave what is new to other gateways; returns when all is answered, or after the time."""
        assert self._running is not None
        self._running.leaving.set()
        await asyncio.wait({self._running.serving}, timeout=timeout_s)
        return pack(Done())

    async def stop(self) -> bytes:
        """Requests under way end with an error that says so; the process ends after the answer."""
        async with self._starting:
            if self._running is not None:
                await self._running.stop()
        end_process()
        return pack(Done())


@dataclass
class _RunningGateway:
    url: str
    cluster: JoinedCluster
    serving: asyncio.Task[None]
    stopping: asyncio.Event
    leaving: asyncio.Event

    async def stop(self) -> None:
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
            spec.fingerprint,
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
