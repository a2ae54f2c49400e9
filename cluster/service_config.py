"""How many callers a node serves, and how long they may take."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.keepalive import KeepaliveConfig
from protocol import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What exceeds a limit is refused; nothing grows.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_connections: int = 256
    max_strangers: int = 64  # connections in their handshake; more push out the oldest
    handshake_timeout_s: float = 5.0  # then who has not said who it is, is dropped
    linger_s: float = 1.0  # that the end of a connection waits for last words to leave
    keepalive: KeepaliveConfig = field(default_factory=KeepaliveConfig)

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_strangers"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
        if self.handshake_timeout_s <= 0:
            raise ConfigError(
                "handshake_timeout_s", f"must be above 0, not {self.handshake_timeout_s:g}"
            )
