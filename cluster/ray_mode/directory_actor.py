"""The embedded directory server as a Ray actor, for clusters that have no Redis or Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

import ray

from cluster.eventually import eventually
from cluster.node_setup import set_up_logging
from cluster.ray_mode.member_actor import MemberActor
from cluster.ray_mode.spec import DIRECTORY, DirectoryPlan, Started, unpack
from directory import EmbeddedServer
from protocol import KvrelayError

_WATCH_S = 0.5  # a child process tells nobody of its end who has an event loop in another thread


class DirectoryActor(MemberActor["_RunningServer"]):
    def __init__(self, plan: bytes) -> None:
        super().__init__()
        told = unpack(plan)
        assert isinstance(told, DirectoryPlan), told
        self._plan = told
        set_up_logging(DIRECTORY, told.log_level)

    async def _bring_up(self) -> _RunningServer:
        plan = self._plan
        assert plan.address.password is not None
        server = EmbeddedServer(plan.host, port=plan.port, password=plan.address.password.value)
        await asyncio.to_thread(server.start)
        return _RunningServer(server)

    def _describe(self) -> Started:
        return Started(self._plan.address.url, ray.util.get_node_ip_address(), os.getpid())

    async def run(self) -> str:
        """Returns when the server has ended by itself."""
        while not await eventually(self._has_ended, within_s=_WATCH_S, every_s=_WATCH_S):
            pass
        return "its server has ended"

    def _has_ended(self) -> bool:
        return not self._running.server.running


@dataclass
class _RunningServer:
    server: EmbeddedServer

    async def stop(self) -> None:
        with contextlib.suppress(KvrelayError):
            await asyncio.to_thread(self.server.stop)
