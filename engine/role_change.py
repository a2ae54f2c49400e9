"""What a node is from then on."""

from __future__ import annotations

from dataclasses import dataclass

from engine.role_policy import RolePolicy
from protocol import NodeInfo
from scheduler import SchedulerConfig


@dataclass(frozen=True)
class RoleChange:
    """To be made when the node has drained. `info` is of its next generation."""

    info: NodeInfo
    policy: RolePolicy
    scheduler: SchedulerConfig
