"""cluster.yaml: what it may say, and the settings that come of it.

A setting has one name here, that of its place in the file: `max_model_len`, `cache.block_size`,
`scheduler.max_num_seqs`. Every ConfigError about it uses that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from cluster.config import CacheSize, LocalConfig, NodeCores, ServeConfig, Topology, errors_of
from cluster.ray_config import GatewayReplicas, NodeResources
from cluster.ray_sections import (
    AutoscalingSection,
    DirectorySection,
    RayNode,
    RaySection,
)
from cluster.section import Section, Size
from cluster.sizes import parse_size
from cluster.transfer_config import ConnectorSpec, TransferConfig, TransportChoice
from cluster.yaml_problem import describe, dotted
from decode_node import DecodeConfig
from decode_node.config import Reserve
from engine import EngineConfig, KernelsChoice, Quantization
from kv_transfer import FaultPlan, OnTransferFailure
from protocol import ConfigError, Role
from router import RouterConfig, get_policy
from scheduler import SchedulerKnobs

DEFAULT_MODEL = "smollm2-135m"


class _SomeKnobs:
    """Makes pydantic accept any of the fields of SchedulerKnobs, with their types, and no other."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        types = get_type_hints(SchedulerKnobs)
        return core_schema.typed_dict_schema(
            {
                knob.name: core_schema.typed_dict_field(
                    handler.generate_schema(types[knob.name]), required=False
                )
                for knob in fields(SchedulerKnobs)
            },
            extra_behavior="forbid",
            config=core_schema.CoreConfig(strict=True),
        )


Knobs = Annotated[dict[str, Any], _SomeKnobs()]


class CacheOverride(Section):
    """What differs from `cache` on nodes of one kind."""

    block_size: int | None = None
    kv_memory: Size | None = None
    num_blocks: int | None = None


class PrefillSection(RayNode):
    count: int = LocalConfig.num_prefill
    threads: int | None = NodeCores.threads
    cpus: list[int] | None = None
    cache: CacheOverride = CacheOverride()
    scheduler: Knobs = Field(default_factory=dict)


class DecodeSection(RayNode):
    count: int = LocalConfig.num_decode
    threads: int | None = NodeCores.threads
    cpus: list[int] | None = None
    reserve: Reserve = DecodeConfig.reserve
    cache: CacheOverride = CacheOverride()
    scheduler: Knobs = Field(default_factory=dict)


class UnifiedSection(RayNode):
    """What is left out is as in `decode`."""

    count: int = LocalConfig.num_unified
    threads: int | None = None
    cpus: list[int] | None = None
    cache: CacheOverride = CacheOverride()
    scheduler: Knobs = Field(default_factory=dict)


class ConnectorSection(Section):
    path: str = Field(alias="class")
    options: dict[str, Any] = Field(default_factory=dict)


class TransferSection(Section):
    transport: Annotated[TransportChoice, Field(strict=False)] = TransferConfig.transport
    bind: str = TransferConfig.bind
    nixl_device: str | None = TransferConfig.nixl_device
    nixl_transports: str = TransferConfig.nixl_transports
    layerwise: bool = TransferConfig.layerwise
    checksums: bool = TransferConfig.checksums
    on_transfer_failure: OnTransferFailure = TransferConfig.on_transfer_failure
    max_quarantine: int | None = TransferConfig.max_quarantine
    reserve_timeout_s: float = TransferConfig.reserve_timeout_s
    transfer_timeout_s: float = TransferConfig.transfer_timeout_s
    heartbeat_s: float = TransferConfig.heartbeat_s
    connectors: list[ConnectorSection] = Field(default_factory=list)
    faults: dict[str, Any] | None = None

    def transfer_config(self) -> TransferConfig:
        values = {name: getattr(self, name) for name in TransferSection.model_fields}
        connectors = [ConnectorSpec(path=c.path, options=c.options) for c in self.connectors]
        faults = None if self.faults is None else FaultPlan.parse(self.faults)
        return TransferConfig(**(values | {"connectors": tuple(connectors), "faults": faults}))


class CacheSection(Section):
    block_size: int = LocalConfig.block_size
    kv_memory: Size = "1GiB"
    num_blocks: int | None = LocalConfig.num_blocks
    enable_prefix_caching: bool = LocalConfig.enable_prefix_caching

    def size(self) -> CacheSize:
        return CacheSize(
            block_size=self.block_size,
            kv_memory_bytes=parse_size("kv_memory_bytes", self.kv_memory),
            num_blocks=self.num_blocks,
        )


class EngineSection(Section):
    device: str = EngineConfig.device
    dtype: str = EngineConfig.dtype
    kv_cache_dtype: str = EngineConfig.kv_cache_dtype
    quantization: Annotated[Quantization | None, Field(strict=False)] = EngineConfig.quantization
    kernels: Annotated[KernelsChoice, Field(strict=False)] = EngineConfig.kernels
    attention: str = EngineConfig.attention
    batch_invariant: bool = EngineConfig.batch_invariant

    def engine_config(self) -> EngineConfig:
        return EngineConfig(**{name: getattr(self, name) for name in EngineSection.model_fields})


class RouterSection(Section):
    policy: str = RouterConfig.policy


class GatewaySection(Section):
    host: str = ServeConfig.host
    port: int = ServeConfig.port
    replicas: int = GatewayReplicas.count
    num_cpus: float = GatewayReplicas.num_cpus

    def gateway_replicas(self) -> GatewayReplicas:
        """Raises ConfigError: a value is out of its range."""
        return GatewayReplicas(count=self.replicas, num_cpus=self.num_cpus)


class ClusterFile(Section):
    """A deployment. What is not said is as in the settings' own defaults."""

    name: str = "kvrelay"
    model: str = DEFAULT_MODEL
    topology: Annotated[Topology, Field(strict=False)] = LocalConfig.topology
    processes: bool = LocalConfig.processes
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    unified: UnifiedSection = UnifiedSection()
    scheduler: Knobs = Field(default_factory=dict)
    cache: CacheSection = CacheSection()
    max_model_len: int | None = LocalConfig.max_model_len
    engine: EngineSection = EngineSection()
    transfer: TransferSection = TransferSection()
    router: RouterSection = RouterSection()
    gateway: GatewaySection = GatewaySection()
    ray: RaySection = RaySection()
    directory: DirectorySection = DirectorySection()
    autoscaling: AutoscalingSection = AutoscalingSection()

    def with_settings(self, given: Mapping[str, object]) -> ClusterFile:
        """The same but for these, by their names.

        A knob of `scheduler` is then that of all nodes, whatever a role has of its own.

        Raises:
            ConfigError: one of them is not what may stand in a file.
        """
        values = self.model_dump(by_alias=True)
        for name, value in given.items():
            section, _, key = name.rpartition(".")
            _section_of(values, name)[key] = value
            if section == "scheduler":
                for role in Role:
                    values[role]["scheduler"].pop(key, None)
        try:
            return ClusterFile.model_validate(values)
        except ValidationError as error:
            place, problem = describe(error.errors()[0], ClusterFile, lambda place: place)
            raise ConfigError(dotted(place), problem) from error

    def local_config(self) -> LocalConfig:
        """Raises ConfigError: a value is out of its range, or two cannot go together."""
        with named_by_place():
            cache = self.cache.size()
            decode_cache = _cache_of("decode_cache", self.decode.cache, cache)
            return LocalConfig(
                topology=self.topology,
                processes=self.processes,
                num_prefill=self.prefill.count,
                num_decode=self.decode.count,
                num_unified=self.unified.count,
                prefill_cores=_cores("prefill_cores", self.prefill),
                decode_cores=_cores("decode_cores", self.decode),
                unified_cores=self._unified_cores(),
                block_size=cache.block_size,
                kv_memory_bytes=cache.kv_memory_bytes,
                num_blocks=cache.num_blocks,
                prefill_cache=_cache_of("prefill_cache", self.prefill.cache, cache),
                decode_cache=decode_cache,
                unified_cache=_cache_of("unified_cache", self.unified.cache, decode_cache or cache),
                max_model_len=self.max_model_len,
                enable_prefix_caching=self.cache.enable_prefix_caching,
                scheduler=SchedulerKnobs(**self.scheduler),
                prefill_scheduler=self._knobs_of("prefill_scheduler", self.prefill.scheduler),
                decode_scheduler=self._knobs_of("decode_scheduler", self.decode.scheduler),
                unified_scheduler=self._unified_knobs(),
                engine=self.engine.engine_config(),
                transfer=self.transfer.transfer_config(),
                decode=DecodeConfig(reserve=self.decode.reserve),
                router=self._router_config(),
            )

    def resources(self) -> dict[Role, NodeResources]:
        """What Ray sets aside for each node. Raises ConfigError: a value is out of its range."""
        decode = self.decode.node_resources("decode")
        return {
            Role.PREFILL: self.prefill.node_resources("prefill"),
            Role.DECODE: decode,
            Role.UNIFIED: self.unified.node_resources("unified", decode),
        }

    def serve_config(self, cache_dir: Path) -> ServeConfig:
        """Raises ConfigError: the port is none."""
        with named_by_place():
            return ServeConfig(
                host=self.gateway.host,
                port=self.gateway.port,
                cache_dir=cache_dir,
                model=self.model,
            )

    def _unified_cores(self) -> NodeCores | None:
        own, decode = self.unified, self.decode
        if own.threads is None and own.cpus is None:
            return None
        threads = decode.threads if own.threads is None else own.threads
        cpus = decode.cpus if own.cpus is None else own.cpus
        return _cores("unified_cores", own.model_copy(update={"threads": threads, "cpus": cpus}))

    def _unified_knobs(self) -> SchedulerKnobs | None:
        own = self.unified.scheduler
        return self._knobs_of("unified_scheduler", own and self.decode.scheduler | own)

    def _knobs_of(self, name: str, own: dict[str, Any]) -> SchedulerKnobs | None:
        if not own:
            return None
        with errors_of(name):
            return SchedulerKnobs(**(self.scheduler | own))

    def _router_config(self) -> RouterConfig:
        try:
            get_policy(self.router.policy)
        except ConfigError as error:
            raise ConfigError("router.policy", error.problem) from error
        return RouterConfig(policy=self.router.policy)


def _cache_of(name: str, own: CacheOverride, base: CacheSize) -> CacheSize | None:
    """A pool is given by its memory or by its blocks: the one that is said here wins."""
    if own == CacheOverride():
        return None
    num_blocks = base.num_blocks if own.kv_memory is None else None
    with errors_of(name):
        return CacheSize(
            block_size=base.block_size if own.block_size is None else own.block_size,
            kv_memory_bytes=base.kv_memory_bytes
            if own.kv_memory is None
            else parse_size("kv_memory_bytes", own.kv_memory),
            num_blocks=num_blocks if own.num_blocks is None else own.num_blocks,
        )


def _cores(name: str, section: PrefillSection | DecodeSection | UnifiedSection) -> NodeCores:
    cpus = None if section.cpus is None else tuple(section.cpus)
    with errors_of(name):
        return NodeCores(threads=section.threads, cpus=cpus)


def _section_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Where the setting of this name is."""
    for key in name.split(".")[:-1]:
        inner = values.get(key)
        if not isinstance(inner, dict):
            raise ConfigError(name, f"there is no section {key}")
        values = inner
    return values


def _places() -> dict[str, str]:
    """Where in the file a field of the settings is, by the name that it has in a ConfigError."""
    places = {"num_prefill": "prefill.count", "num_decode": "decode.count"}
    places |= {"num_unified": "unified.count"}
    places |= {"reserve": "decode.reserve", "kv_memory_bytes": "cache.kv_memory"}
    sections: dict[str, type[Section]]
    sections = {"cache": CacheSection, "gateway": GatewaySection, "transfer": TransferSection}
    sections["engine"] = EngineSection
    for section, model in sections.items():
        places |= {key: f"{section}.{key}" for key in model.model_fields}
    for knob in fields(SchedulerKnobs):
        places[knob.name] = f"scheduler.{knob.name}"
        for role in Role:
            places[f"{role}_scheduler.{knob.name}"] = f"{role}.scheduler.{knob.name}"
    for role in Role:
        places |= {
            f"{role}_cache.{key}": f"{role}.cache.{key}" for key in CacheOverride.model_fields
        }
        places[f"{role}_cache.kv_memory_bytes"] = f"{role}.cache.kv_memory"
        places |= {f"{role}_cores.{key.name}": f"{role}.{key.name}" for key in fields(NodeCores)}
    return places


_PLACES = _places()


@contextlib.contextmanager
def named_by_place() -> Iterator[None]:
    """A ConfigError about settings that come of a ClusterFile names their place in it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_PLACES.get(error.field, error.field), error.problem) from error
