"""How KV gets from node to node: what may be chosen, and what the hand-off makes of it."""

from __future__ import annotations

import enum
import ipaddress
import math
from dataclasses import dataclass, field
from typing import Any

from kv_transfer import FaultPlan, HandoffConfig, OnTransferFailure
from protocol import ConfigError


class TransportChoice(enum.StrEnum):
    AUTO = "auto"  # memory within one process, shm on one host, nixl between hosts
    MEMORY = "memory"
    SHM = "shm"
    NIXL = "nixl"


@dataclass(frozen=True, kw_only=True)
class ConnectorSpec:
    """A connector of a user's own: `module:Class`, and what it is told."""

    path: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Of all nodes of a cluster.

    Raises:
        ConfigError: a value is out of its range, or a heartbeat would come too late.
    """

    transport: TransportChoice = TransportChoice.AUTO
    bind: str = "127.0.0.1"  # the address on which nixl listens
    nixl_device: str | None = None  # as UCX names it; None: the one that has `bind`
    nixl_transports: str = "all"  # as UCX_TLS has them
    layerwise: bool = HandoffConfig.layerwise  # send each layer of the last chunk when computed
    checksums: bool = HandoffConfig.checksums  # of every block, made by P and compared by D
    on_transfer_failure: OnTransferFailure = HandoffConfig.on_transfer_failure
    max_quarantine: int | None = None  # blocks of a node; None: a quarter of them
    reserve_timeout_s: float = HandoffConfig.reserve_timeout_s
    transfer_timeout_s: float = HandoffConfig.transfer_timeout_s
    heartbeat_s: float = HandoffConfig.heartbeat_s
    connectors: tuple[ConnectorSpec, ...] = ()
    faults: FaultPlan | None = None  # to be injected, for tests and experiments

    def __post_init__(self) -> None:
        for name in ("reserve_timeout_s", "transfer_timeout_s", "heartbeat_s"):
            if not getattr(self, name) < math.inf:  # NaN is not, either
                raise ConfigError(name, f"must be a number of seconds, not {getattr(self, name)}")
        self.handoff()  # checks the rest of them
        if self.max_quarantine is not None and self.max_quarantine < 0:
            raise ConfigError("max_quarantine", f"must be at least 0, not {self.max_quarantine}")
        try:
            ipaddress.ip_address(self.bind)
        except ValueError as error:
            raise ConfigError("bind", f"must be an IP address, not {self.bind!r}") from error

    def quarantine_limit(self, num_blocks: int) -> int:
        """Blocks that may be quarantined on a node with so many usable ones."""
        return num_blocks // 4 if self.max_quarantine is None else self.max_quarantine

    @property
    def may_have_remote_peers(self) -> bool:
        """Whether nodes of other hosts are to find a way here, beside those of this host."""
        listens_outside = not ipaddress.ip_address(self.bind).is_loopback
        return self.transport is TransportChoice.AUTO and listens_outside

    def handoff(self) -> HandoffConfig:
        return HandoffConfig(
            reserve_timeout_s=self.reserve_timeout_s,
            transfer_timeout_s=self.transfer_timeout_s,
            heartbeat_s=self.heartbeat_s,
            checksums=self.checksums,
            layerwise=self.layerwise,
            on_transfer_failure=self.on_transfer_failure,
        )
