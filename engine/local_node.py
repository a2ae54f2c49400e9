"""A node in this process: what `protocol.Node` asks for, on top of an `EngineHost`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from engine.host import EngineHost
from engine.role_policy import RolePolicy
from protocol import CacheSnapshot, NodeInfo, NodeStatus, OutputBatch, PauseMode


class LocalNode:
    """The part that is the same whatever the role."""

    def __init__(self, host: EngineHost, role: RolePolicy) -> None:
        self.host = host
        self._role_policy = role

    @property
    def info(self) -> NodeInfo:
        return self.host.info

    def start(self) -> None:
        self.host.start(self._role_policy)

    def ask_stop(self) -> None:
        """Stop after the step that runs now, if any."""
        self.host.ask_stop()

    def stop(self) -> None:
        self.host.stop()

    async def cancel(self, request_id: str) -> None:
        self.host.post(lambda: self.host.cancel(request_id))

    async def status(self) -> NodeStatus:
        return self.host.full_status()

    async def drain(self, timeout_s: float | None = None) -> None:
        await self.host.drain(timeout_s)

    async def undrain(self) -> None:
        await self.host.undrain()

    async def snapshot(self) -> CacheSnapshot:
        return await self.host.snapshot()

    async def pause(self, mode: PauseMode) -> None:
        await self.host.pause(mode)

    async def resume(self) -> None:
        await self.host.pause(None)

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        return await self.host.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def outputs(self, caller: str) -> AsyncIterator[OutputBatch]:
        return self.host.outputs(caller)
