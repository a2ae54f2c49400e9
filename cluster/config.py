"""What a single-machine deployment may be told."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cluster.transfer_config import TransferConfig, TransportChoice
from decode_node import DecodeConfig
from engine import EngineConfig, KVCacheConfig
from engine.weights import ModelConfig, ModelFiles
from protocol import HASH_BLOCK_SIZE, ConfigError, Role
from router import RouterConfig
from scheduler import SchedulerConfig, SchedulerKnobs

DEFAULT_MAX_MODEL_LEN = 8192  # tokens; a model that was made for more has to be told so
GIB = 1 << 30


class Topology(enum.StrEnum):
    DISAGGREGATED = "disaggregated"
    UNIFIED = "unified"


@dataclass(frozen=True, kw_only=True)
class NodeCores:
    """The cores of each node of a kind.

    Raises:
        ConfigError: there are none.
    """

    threads: int | None = None  # that compute; None: as many as cpus, or an equal share of all,
    # which nodes of one process give to each other while they have nothing to do
    cpus: tuple[int, ...] | None = None  # numbers of the only ones it may use; None: any

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError("threads", f"must be at least 1, not {self.threads}")
        if self.cpus is not None and (not self.cpus or min(self.cpus) < 0):
            raise ConfigError("cpus", f"must be numbers of cores, not {list(self.cpus)}")

    def num_threads(self, num_cores: int, num_nodes: int) -> int:
        """Of one of `num_nodes` nodes on a machine with `num_cores`."""
        if self.threads is not None:
            return self.threads
        return max(1, num_cores // num_nodes) if self.cpus is None else len(self.cpus)


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """The KV pool of a node.

    Raises:
        ConfigError: a value is out of its range.
    """

    block_size: int = 16  # tokens
    kv_memory_bytes: int = GIB
    num_blocks: int | None = None  # usable ones; None: as many as fit into kv_memory_bytes

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_memory_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError("num_blocks", f"must be at least 1, not {self.num_blocks}")
        if self.block_size % HASH_BLOCK_SIZE:
            raise ConfigError(
                "block_size", f"must be a multiple of {HASH_BLOCK_SIZE}, not {self.block_size}"
            )


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """A cluster on one machine. Sizes of pools and batches are those of each node.

    `prefill_scheduler` and `decode_scheduler` take the place of `scheduler` on the nodes of their
    kind, `prefill_cache` and `decode_cache` that of the sizes that all have. What is not said of
    unified nodes is as for decode nodes.

    Raises:
        ConfigError: a value is out of its range, or two of them cannot go together.
    """

    topology: Topology = Topology.DISAGGREGATED
    processes: bool = False  # each node in one of its own
    num_prefill: int = 1
    num_decode: int = 1
    num_unified: int = 0  # of topology unified, which has no others: 0 means num_decode
    prefill_cores: NodeCores = field(default_factory=NodeCores)
    decode_cores: NodeCores = field(default_factory=NodeCores)
    unified_cores: NodeCores | None = None
    block_size: int = CacheSize.block_size
    kv_memory_bytes: int = CacheSize.kv_memory_bytes
    num_blocks: int | None = CacheSize.num_blocks
    prefill_cache: CacheSize | None = None
    decode_cache: CacheSize | None = None
    unified_cache: CacheSize | None = None
    max_model_len: int | None = None  # None: the model's, but at most DEFAULT_MAX_MODEL_LEN
    enable_prefix_caching: bool = True
    scheduler: SchedulerKnobs = field(default_factory=SchedulerKnobs)
    prefill_scheduler: SchedulerKnobs | None = None
    decode_scheduler: SchedulerKnobs | None = None
    unified_scheduler: SchedulerKnobs | None = None
    transfer: TransferConfig = field(default_factory=TransferConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    record_schedules: Path | None = None  # a directory, for what each node's scheduler decides

    def __post_init__(self) -> None:
        self._check_numbers()
        _ = self._common_cache  # checks it
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                "max_model_len",
                f"must be at least 2, a prompt token and one more, not {self.max_model_len}",
            )
        names = ("scheduler", "prefill_scheduler", "decode_scheduler", "unified_scheduler")
        for name in names:
            knobs = getattr(self, name)
            if knobs is not None:
                with errors_of(name):
                    _check_capabilities(knobs)
        self._check_processes()
        if self.engine.is_cuda and self.transport is TransportChoice.SHM:
            raise ConfigError(
                "transport", "shm moves memory of the host; with device cuda it is memory or nixl"
            )

    def _check_numbers(self) -> None:
        """There are prefill and decode nodes, or unified ones, or all three; not two of them."""
        least = {"num_prefill": 1, "num_decode": 1, "num_unified": 0}
        unless = ""
        if self.topology is Topology.UNIFIED:
            least |= {"num_prefill": 0, "num_decode": 0 if self.num_unified else 1}
        elif self.num_unified and not (self.num_prefill or self.num_decode):
            least |= {"num_prefill": 0, "num_decode": 0}
        elif self.num_unified:
            unless = ", unless there are only unified nodes"
        for name, minimum in least.items():
            if (number := getattr(self, name)) < minimum:
                raise ConfigError(name, f"must be at least {minimum}, not {number}{unless}")

    def _check_processes(self) -> None:
        if self.processes:
            if self.transfer.transport is TransportChoice.MEMORY:
                raise ConfigError(
                    "transport", "memory is within one process; nodes with their own need shm"
                )
            return
        for name in ("prefill_cores", "decode_cores", "unified_cores"):
            if getattr(getattr(self, name), "cpus", None) is not None:
                raise ConfigError(
                    f"{name}.cpus", "needs `processes`: nodes of one process share its cores"
                )

    @property
    def transport(self) -> TransportChoice:
        """The one that `auto` stands for, or the one that was chosen."""
        if self.transfer.transport is not TransportChoice.AUTO:
            return self.transfer.transport
        if not self.processes:
            return TransportChoice.MEMORY
        return TransportChoice.NIXL if self.engine.is_cuda else TransportChoice.SHM

    @property
    def routing(self) -> RouterConfig:
        """The router's settings, which have to know what nodes do about a failed hand-off."""
        recomputes = self.transfer.on_transfer_failure == "recompute"
        return replace(self.router, decode_recomputes=recomputes)

    @property
    def node_ids(self) -> list[tuple[Role, str]]:
        """All nodes, by their roles."""
        return [
            (role, f"{role}-{number}")
            for role, num_nodes in self.num_nodes.items()
            for number in range(num_nodes)
        ]

    def name_of(self, setting: str, role: Role) -> str:
        """The field that has this setting of nodes of this role."""
        own = f"{role}_{setting}"
        as_decode = role is Role.UNIFIED and getattr(self, own) is None
        return f"decode_{setting}" if as_decode else own

    def fingerprint(self, files: ModelFiles) -> str:
        """What nodes must have in common to exchange KV: the model, and how it is computed."""
        return self.engine.fingerprint(files.fingerprint)

    def cores(self, role: Role) -> NodeCores:
        cores: NodeCores = getattr(self, self.name_of("cores", role))
        return cores

    @property
    def num_nodes(self) -> dict[Role, int]:
        """The number of nodes of each role that there are."""
        if self.topology is Topology.UNIFIED:
            return {Role.UNIFIED: self.num_unified or self.num_decode}
        numbers = {
            Role.PREFILL: self.num_prefill,
            Role.DECODE: self.num_decode,
            Role.UNIFIED: self.num_unified,
        }
        return {role: number for role, number in numbers.items() if number}

    def model_len(self, model: ModelConfig) -> int:
        """Tokens of a prompt and its output. Raises ConfigError: the model was made for fewer."""
        if self.max_model_len is None:
            return min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > model.max_position_embeddings:
            raise ConfigError(
                "max_model_len",
                f"must be at most {model.max_position_embeddings}, for which the model was made, "
                f"not {self.max_model_len}",
            )
        return self.max_model_len

    def scheduler_config(
        self, role: Role, model: ModelConfig, num_blocks: int, *, plans_ahead: bool = True
    ) -> SchedulerConfig:
        """The settings of a node with `num_blocks` usable blocks.

        `plans_ahead`: what the node has decided, for where `async_scheduling` is unset.

        Raises:
            ConfigError: a knob does not go with the longest request of this model.
        """
        name = self.name_of("scheduler", role)
        if getattr(self, name) is None:
            name = "scheduler"
        knobs: SchedulerKnobs = getattr(self, name)
        parked = num_blocks // 2 if knobs.max_parked_blocks is None else knobs.max_parked_blocks
        with errors_of(name):
            return SchedulerConfig.of(
                knobs,
                plans_ahead=plans_ahead,
                max_model_len=self.model_len(model),
                max_parked_blocks=max(1, parked),
            )

    @property
    def _common_cache(self) -> CacheSize:
        return CacheSize(
            block_size=self.block_size,
            kv_memory_bytes=self.kv_memory_bytes,
            num_blocks=self.num_blocks,
        )

    def cache_size(self, role: Role) -> CacheSize:
        """What was asked for on nodes of this kind."""
        own: CacheSize | None = getattr(self, self.name_of("cache", role))
        return own or self._common_cache

    def kv_cache(self, model: ModelConfig, role: Role) -> KVCacheConfig:
        """The pool of each node of this kind.

        Raises:
            ConfigError: it would be too small for one request of `max_model_len` tokens.
        """
        name = self.name_of("cache", role)
        size, length = self.cache_size(role), self.model_len(model)
        shape = partial(
            KVCacheConfig.for_model,
            model,
            block_size=size.block_size,
            dtype=self.engine.cache_dtype,
            device=self.engine.device,
        )
        one = shape(num_blocks=2)
        usable = size.num_blocks or size.kv_memory_bytes // one.bytes_per_block - 1
        needed = -(-length // size.block_size)
        if size.num_blocks is None and usable < needed:
            field = "kv_memory_bytes"
            raise ConfigError(
                field if getattr(self, name) is None else f"{name}.{field}",
                f"{_mib(size.kv_memory_bytes)} hold {max(0, usable) * size.block_size} tokens, but "
                f"one request of max_model_len ({length}) tokens needs "
                f"{_mib((needed + 1) * one.bytes_per_block)}; raise it, or lower max_model_len",
            )
        return shape(num_blocks=usable + 1)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where the gateway listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    cache_dir: Path
    model: str

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"must be from 0 to 65535, not {self.port}")


def _check_capabilities(knobs: SchedulerKnobs) -> None:
    """The scheduler can do more than the engine."""
    if knobs.max_loras is not None:
        raise ConfigError("max_loras", "this engine serves no adapters yet; leave it unset")
    if knobs.spec_method is not None:
        raise ConfigError("spec_method", "this engine knows no draft tokens yet; leave it unset")


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """What is wrong with the knobs of one kind of node says so; those of all need not."""
    try:
        yield
    except ConfigError as error:
        if name == "scheduler":
            raise
        raise ConfigError(f"{name}.{error.field}", error.problem) from error


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
