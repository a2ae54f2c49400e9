"""How KV gets from node to node: what may be chosen, and what the hand-off makes of it."""

from __future__ import annotations

import enum
import ipaddress
import math
import socket
from dataclasses import dataclass, field, replace
from typing import Any

from kv_transfer import FaultPlan, HandoffConfig, OnTransferFailure
from protocol import ConfigError

_AUTO = "auto"


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
    bind: str = "127.0.0.1"  # the address where other hosts reach a node; or auto, or a network
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
        if self.bind != _AUTO and _network_of(self.bind) is None:
            raise ConfigError(
                "bind",
                f"must be an IP address, a network such as 10.0.0.0/8, or auto, not {self.bind!r}",
            )

    def quarantine_limit(self, num_blocks: int) -> int:
        """Blocks that may be quarantined on a node with so many usable ones."""
        return num_blocks // 4 if self.max_quarantine is None else self.max_quarantine

    @property
    def listens_outside(self) -> bool:
        """Whether nodes are reached from other hosts."""
        network = _network_of(self.bind)
        return network is None or not network.is_loopback

    @property
    def may_have_remote_peers(self) -> bool:
        """Whether nodes of other hosts are to find a way here, beside those of this host."""
        return self.transport is TransportChoice.AUTO and self.listens_outside

    def bound(self, host_address: str | None = None) -> TransferConfig:
        """The same with this host's own address in `bind`.

        `host_address` is the one that `auto` means; None: nobody knows.

        Raises:
            ConfigError: this host has no address in that network.
        """
        if self.bind == _AUTO:
            if host_address is None:
                raise ConfigError("bind", "auto is for clusters on Ray, which knows the addresses")
            return replace(self, bind=host_address)
        if "/" not in self.bind:
            return self
        return replace(self, bind=_own_address_in(ipaddress.ip_network(self.bind, strict=False)))

    def handoff(self) -> HandoffConfig:
        return HandoffConfig(
            reserve_timeout_s=self.reserve_timeout_s,
            transfer_timeout_s=self.transfer_timeout_s,
            heartbeat_s=self.heartbeat_s,
            checksums=self.checksums,
            layerwise=self.layerwise,
            on_transfer_failure=self.on_transfer_failure,
        )


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _network_of(bind: str) -> _Network | None:
    try:
        return ipaddress.ip_network(bind, strict=False)
    except ValueError:
        return None


def _own_address_in(network: _Network) -> str:
    """The address from which this host would speak to the network; nothing is sent."""
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(network.network_address + 1), 9))
        except OSError:
            own = None
        else:
            own = str(probe.getsockname()[0])
    if own is None or ipaddress.ip_address(own) not in network:
        raise ConfigError("bind", f"this host has no address in {network}")
    return own
