"""The parts of cluster.yaml that are about Ray: what they may say, and the settings of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cluster.autoscaling_config import AutoscalingConfig, ScalingBounds
from cluster.directory_config import DirectoryConfig
from cluster.ray_config import NodeResources, Placement, RayConfig
from cluster.section import Section, Size
from cluster.sizes import parse_size
from protocol import ConfigError


class RayNode(Section):
    """What Ray is told of the nodes of a kind. None: as for decode nodes, or the default."""

    num_cpus: float | None = None
    num_gpus: float | None = None
    resources: dict[str, float] | None = None
    memory: Size | None = None
    max_restarts: int | None = None

    def node_resources(self, name: str, like: NodeResources | None = None) -> NodeResources:
        """`name` of the section, for errors; `like`: what is meant where this says nothing."""
        base = like or NodeResources()
        try:
            return NodeResources(
                num_cpus=base.num_cpus if self.num_cpus is None else self.num_cpus,
                num_gpus=base.num_gpus if self.num_gpus is None else self.num_gpus,
                resources=base.resources if self.resources is None else self.resources,
                memory_bytes=base.memory_bytes
                if self.memory is None
                else parse_size("memory", self.memory),
                max_restarts=base.max_restarts if self.max_restarts is None else self.max_restarts,
            )
        except ConfigError as error:
            raise ConfigError(f"{name}.{error.field}", error.problem) from error


class RaySection(Section):
    address: str | None = RayConfig.address
    host: str = RayConfig.host
    num_cpus: int | None = RayConfig.num_cpus
    placement: Annotated[Placement, Field(strict=False)] = RayConfig.placement
    separate_roles: bool = RayConfig.separate_roles
    placement_timeout_s: float = RayConfig.placement_timeout_s
    start_timeout_s: float = RayConfig.start_timeout_s
    health_interval_s: float = RayConfig.health_interval_s
    health_timeout_s: float = RayConfig.health_timeout_s
    launcher: dict[str, Any] | None = None

    def ray_config(self) -> RayConfig:
        """Raises ConfigError: a value is out of its range."""
        return RayConfig(**dict(self))


class DirectorySection(Section):
    url: str | None = None
    key_prefix: str | None = DirectoryConfig.key_prefix
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    node_ttl_s: float = DirectoryConfig.node_ttl_s

    def directory_config(self) -> DirectoryConfig:
        """Raises ConfigError: a value is out of its range."""
        files = {
            name: None if (path := getattr(self, name)) is None else Path(path).expanduser()
            for name in ("tls_ca", "tls_cert", "tls_key")
        }
        return DirectoryConfig(
            url=self.url, key_prefix=self.key_prefix, node_ttl_s=self.node_ttl_s, **files
        )


class BoundsSection(Section):
    min: int | None = ScalingBounds.min
    max: int | None = ScalingBounds.max


class AutoscalingSection(Section):
    enabled: bool = AutoscalingConfig.enabled
    prefill: BoundsSection = BoundsSection()
    decode: BoundsSection = BoundsSection()
    unified: BoundsSection = BoundsSection()
    target_queue_s: float = AutoscalingConfig.target_queue_s
    target_kv_use: float = AutoscalingConfig.target_kv_use
    tolerance: float = AutoscalingConfig.tolerance
    scale_up_after_s: float = AutoscalingConfig.scale_up_after_s
    scale_down_after_s: float = AutoscalingConfig.scale_down_after_s
    interval_s: float = AutoscalingConfig.interval_s

    def autoscaling_config(self) -> AutoscalingConfig:
        """Raises ConfigError: a value is out of its range."""
        values: dict[str, Any] = dict(self)
        for role in ("prefill", "decode", "unified"):
            bounds: BoundsSection = values[role]
            try:
                values[role] = ScalingBounds(min=bounds.min, max=bounds.max)
            except ConfigError as error:
                raise ConfigError(f"autoscaling.{role}.{error.field}", error.problem) from error
        return AutoscalingConfig(**values)
