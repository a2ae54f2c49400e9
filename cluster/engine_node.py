"""A node in this process that can have any role, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from decode_node import DecodeConfig, DecodeRole
from engine import EngineHost, LocalNode, RoleChange
from kv_transfer import HandoffConnector
from prefill_node import PrefillRole
from protocol import ConfigError, DecodeJob, NodeInfo, PrefillJob, Role, WrongRole
from scheduler import SchedulerConfig
from scheduler.recording import RecordingScheduler


@dataclass(frozen=True, kw_only=True)
class NodeRoles:
    """What a node needs to know of all roles that it could have."""

    connector: HandoffConnector
    decode: DecodeConfig
    scheduler_config: Callable[[Role], SchedulerConfig]

    def policy(self, role: Role, host: EngineHost) -> PrefillRole | DecodeRole:
        if role is Role.PREFILL:
            return PrefillRole(host, self.connector)
        return DecodeRole(host, self.connector, self.decode)


class EngineNode(LocalNode):
    """`protocol.PrefillNode` and `protocol.DecodeNode`; the role says which of the two answers."""

    def __init__(self, host: EngineHost, roles: NodeRoles) -> None:
        self._roles = roles
        super().__init__(host, roles.policy(host.info.role, host))

    async def prefill(self, job: PrefillJob) -> None:
        """Raises WrongRole, or as `EngineHost.submit` does."""
        role = self.host.role
        if not isinstance(role, PrefillRole):
            raise self._wrong_role("prefill")
        self.host.submit(job, role, min_tokens=0)  # it ends with its next token

    async def decode(self, job: DecodeJob) -> None:
        """Raises WrongRole, or as `EngineHost.submit` does."""
        role = self.host.role
        if not isinstance(role, DecodeRole):
            raise self._wrong_role("decode")
        self.host.submit(job, role)

    async def change_role(self, role: Role) -> NodeInfo:
        """The pool keeps its size, and connectors besides the hand-off keep what they were told."""
        if role is self.info.role:
            return self.info
        change = self._change_to(role)
        await self.host.change_role(change)
        return change.info

    def _wrong_role(self, kind: str) -> WrongRole:
        return WrongRole(f"node {self.info.node_id} is a {self.info.role} node: no {kind} jobs")

    def _change_to(self, role: Role) -> RoleChange:
        """Raises ConfigError: the settings of the roles differ in what a node cannot change."""
        scheduler = self.host.engine.scheduler
        config, now = self._roles.scheduler_config(role), scheduler.config
        if config.async_scheduling != now.async_scheduling:
            raise ConfigError(
                "async_scheduling",
                f"is not the same for {self.info.role} and {role} nodes, so {self.info.node_id} "
                "cannot change from one to the other while it lives",
            )
        if config != now and isinstance(scheduler, RecordingScheduler):
            raise ConfigError(
                "record_schedules",
                f"a recording has one configuration, and that of {role} nodes differs from what "
                f"{self.info.node_id} has",
            )
        info = msgspec.structs.replace(
            self.info,
            role=role,
            generation=self.info.generation + 1,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        return RoleChange(info, self._roles.policy(role, self.host), config)
