"""The settings of a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol import ConfigError

Reserve = Literal["on_start", "on_arrival"]


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """When blocks are reserved for a request that is prefilled elsewhere.

    `on_start`: when its prefill starts. `on_arrival`: at once; blocks are idle for longer, but
    the push never waits for them.

    Raises:
        ConfigError: `reserve` is neither.
    """

    reserve: Reserve = "on_start"

    def __post_init__(self) -> None:
        if self.reserve not in ("on_start", "on_arrival"):
            raise ConfigError("reserve", f"must be on_start or on_arrival, not {self.reserve!r}")
