"""What a deployment on Ray may be told beyond what one on a single machine may."""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol import ConfigError

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_RAY_PORT = 6379


class Placement(enum.StrEnum):
    """How nodes are spread over hosts. The strict ones fail where the others do what they can."""

    PACK = "pack"
    SPREAD = "spread"
    STRICT_PACK = "strict_pack"
    STRICT_SPREAD = "strict_spread"


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Which Ray cluster, and how nodes are placed on it.

    Raises:
        ConfigError: a value is out of its range, or two of them cannot go together.
    """

    address: str | None = None  # None: start one here; auto: the one of this machine; host:port
    host: str = "127.0.0.2"  # of the one that is started here
    num_cpus: int | None = None  # that it takes the machine to have; None: as many as are needed
    placement: Placement = Placement.PACK
    separate_roles: bool = False  # prefill and decode nodes never share a host
    placement_timeout_s: float = 60.0  # until all nodes have a place
    start_timeout_s: float = 300.0  # until a node that has one is ready
    health_interval_s: float = 2.0
    health_timeout_s: float = 15.0  # without an answer, and an actor is taken for dead
    launcher: Mapping[str, Any] | None = None  # Ray's own cluster launcher configuration

    def __post_init__(self) -> None:
        if self.address not in (None, "auto"):
            _check_address(str(self.address))
        try:
            ipaddress.ip_address(self.host)
        except ValueError as error:
            raise ConfigError("ray.host", f"must be an IP address, not {self.host!r}") from error
        if self.num_cpus is not None and self.num_cpus < 1:
            raise ConfigError("ray.num_cpus", f"must be at least 1, not {self.num_cpus}")
        if self.num_cpus is not None and self.address is not None:
            raise ConfigError("ray.num_cpus", "is for a Ray that is started here; drop `address`")
        for name in _SECONDS:
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"ray.{name}", f"must be a number of seconds above 0, not {getattr(self, name)}"
                )
        if self.launcher is not None and self.address is not None:
            raise ConfigError("ray.launcher", "starts a Ray cluster of its own; drop `address`")


_SECONDS = (
    "placement_timeout_s",
    "start_timeout_s",
    "health_interval_s",
    "health_timeout_s",
)


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535 or "//" in address:
        raise ConfigError(
            "ray.address",
            f"must be auto, or an address such as 10.0.0.1:{_RAY_PORT}, not {address!r}",
        )


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """What Ray sets aside for each node of a kind, and how often it is started again."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)  # custom ones of Ray
    memory_bytes: int | None = None
    max_restarts: int | None = None  # None: always

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus", "memory_bytes", "max_restarts"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(name, f"must be at least 0, not {value}")
        for name, amount in self.resources.items():
            if not 0 < amount < float("inf"):
                raise ConfigError("resources", f"{name}: must be above 0, not {amount}")
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ConfigError("resources", f"{name} has a field of its own")

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray's placement groups take it."""
        amounts = {
            "CPU": self.num_cpus,
            "GPU": self.num_gpus,
            "memory": float(self.memory_bytes or 0),
            **self.resources,
        }
        return {name: amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True, kw_only=True)
class GatewayReplicas:
    """The gateways of a deployment; all of one host share its port."""

    count: int = 1
    num_cpus: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError("gateway.replicas", f"must be at least 0, not {self.count}")
        if not 0 <= self.num_cpus < float("inf"):
            raise ConfigError("gateway.num_cpus", f"must be at least 0, not {self.num_cpus}")


def check_name(name: str) -> None:
    """Raises ConfigError: this is no name of a cluster."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError("name", f"must be 1 to 40 of a-z, 0-9 and hyphens inside, not {name!r}")
