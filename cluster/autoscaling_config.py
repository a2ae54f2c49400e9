"""When a cluster grows and shrinks by itself, and how far."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScalingBounds:
    """Of the number of nodes of one role. With both left out, it stays as it is."""

    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        for name in ("min", "max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, f"must be at least 1, not {value}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError("max", f"must be at least min ({self.min}), not {self.max}")


@dataclass(frozen=True, kw_only=True)
class AutoscalingConfig:
    """Targets, and how patient to be with what misses them.

    Raises:
        ConfigError: a value is out of its range.
    """

    enabled: bool = False
    prefill: ScalingBounds = field(default_factory=ScalingBounds)
    decode: ScalingBounds = field(default_factory=ScalingBounds)
    unified: ScalingBounds = field(default_factory=ScalingBounds)
    target_queue_s: float = 1.0  # of prompt tokens that wait, at the measured rate
    target_kv_use: float = 0.7  # share of the blocks that are used
    tolerance: float = 0.2  # around a target, within which nothing changes
    scale_up_after_s: float = 15.0  # above it for so long
    scale_down_after_s: float = 120.0  # below it for so long
    interval_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("target_queue_s", "scale_up_after_s", "scale_down_after_s", "interval_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"autoscaling.{name}", f"must be above 0, not {getattr(self, name)}"
                )
        if not 0 < self.target_kv_use <= 1:
            raise ConfigError(
                "autoscaling.target_kv_use",
                f"must be above 0 and at most 1, not {self.target_kv_use}",
            )
        if not 0 <= self.tolerance < 1:
            raise ConfigError(
                "autoscaling.tolerance", f"must be from 0 to below 1, not {self.tolerance}"
            )
