"""The embedded directory server as a Ray actor, for clusters that have no Redis or Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import os

import ray

from cluster.eventually import eventually
from cluster.node_setup import set_up_logging
from cluster.ray_mode.actor_process import end_process
from cluster.ray_mode.spec import (
    DIRECTORY,
    DirectoryPlan,
    Done,
    Failed,
    Started,
    pack,
    unpack,
)
from directory import EmbeddedServer
from protocol import KvrelayError

_WATCH_S = 0.5  # a child process tells nobody of its end who has an event loop in another thread


class DirectoryActor:
    """Its methods are for the controller; they answer with packed messages, never with objects."""

    def __init__(self, plan: bytes) -> None:
        told = unpack(plan)
        assert isinstance(told, DirectoryPlan), told
        self._plan = told
        self._starting = asyncio.Lock()
        self._server: EmbeddedServer | None = None
        set_up_logging(DIRECTORY, told.log_level)

    async def start(self) -> bytes:
        """Started once the server answers, or Failed. Asked again, it says the same."""
        async with self._starting:
            try:
                if self._server is None:
                    self._server = await asyncio.to_thread(self._start)
            except (KvrelayError, TimeoutError) as error:
                return pack(Failed.of(error))
        return pack(Started(self._plan.address.url, ray.util.get_node_ip_address(), os.getpid()))

    def _start(self) -> EmbeddedServer:
        plan = self._plan
        assert plan.address.password is not None
        server = EmbeddedServer(plan.host, port=plan.port, password=plan.address.password.value)
        server.start()
        return server

    async def run(self) -> str:
        """Returns when the server has ended by itself."""
        assert self._server is not None
        while not await eventually(self._has_ended, within_s=_WATCH_S, every_s=_WATCH_S):
            pass
        return "its server has ended"

    def _has_ended(self) -> bool:
        return self._server is not None and not self._server.running

    async def ping(self) -> None:
        """Whoever gets an answer knows that this process is alive, and has time."""

    async def stop(self) -> bytes:
        async with self._starting:
            if self._server is not None:
                with contextlib.suppress(KvrelayError):
                    await asyncio.to_thread(self._server.stop)
        end_process()
        return pack(Done())
