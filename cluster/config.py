"""What a single-machine deployment may be told."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from decode_node import DecodeConfig
from engine import KVCacheConfig
from engine.weights import ModelConfig
from protocol import HASH_BLOCK_SIZE, ConfigError
from router import RouterConfig
from scheduler import Policy, SchedulerConfig

DEFAULT_MAX_MODEL_LEN = 8192  # tokens; a model that was made for more has to be told so
GIB = 1 << 30


class Topology(enum.StrEnum):
    DISAGGREGATED = "disaggregated"
    UNIFIED = "unified"

    @classmethod
    def parse(cls, name: str) -> Topology:
        """Raises ConfigError: there is none of this name."""
        if name not in tuple(cls):
            raise ConfigError("topology", f"must be {' or '.join(cls)}, not {name!r}")
        return cls(name)


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """A cluster in one process. Sizes of pools and batches are those of each node.

    Raises:
        ConfigError: a value is out of its range, or two of them cannot go together.
    """

    topology: Topology = Topology.DISAGGREGATED
    num_prefill: int = 1
    num_decode: int = 1  # of topology unified: the number of unified nodes
    block_size: int = 16  # tokens
    kv_memory_bytes: int = GIB
    num_blocks: int | None = None  # usable ones; None: as many as fit into kv_memory_bytes
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None  # None: the model's, but at most DEFAULT_MAX_MODEL_LEN
    enable_prefix_caching: bool = True
    scheduling_policy: Policy = "fcfs"
    scheduler_reserve_full_isl: bool = True
    long_prefill_token_threshold: int = 0
    max_parked_blocks: int | None = None  # of a decode node; None: half of its pool
    checksums: bool = True
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(_flag(name), f"must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max-num-batched-tokens",
                f"must be at least max-num-seqs ({self.max_num_seqs}), "
                f"not {self.max_num_batched_tokens}",
            )
        if self.block_size % HASH_BLOCK_SIZE:
            raise ConfigError(
                "block-size", f"must be a multiple of {HASH_BLOCK_SIZE}, not {self.block_size}"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                "max-model-len",
                f"must be at least 2, a prompt token and one more, not {self.max_model_len}",
            )

    def model_len(self, model: ModelConfig) -> int:
        """Tokens of a prompt and its output. Raises ConfigError: the model was made for fewer."""
        if self.max_model_len is None:
            return min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > model.max_position_embeddings:
            raise ConfigError(
                "max-model-len",
                f"must be at most {model.max_position_embeddings}, for which the model was made, "
                f"not {self.max_model_len}",
            )
        return self.max_model_len

    def scheduler(self, model: ModelConfig, num_blocks: int) -> SchedulerConfig:
        """The settings of a node with `num_blocks` usable blocks."""
        parked = num_blocks // 2 if self.max_parked_blocks is None else self.max_parked_blocks
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.model_len(model),
            policy=self.scheduling_policy,
            scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_parked_blocks=max(1, parked),
        )

    def kv_cache(self, model: ModelConfig) -> KVCacheConfig:
        """The pool of each node.

        Raises:
            ConfigError: it would be too small for one request of `max_model_len` tokens.
        """
        one = KVCacheConfig.for_model(model, num_blocks=2, block_size=self.block_size)
        usable = self.num_blocks or self.kv_memory_bytes // one.bytes_per_block - 1
        needed = -(-self.model_len(model) // self.block_size)
        if self.num_blocks is None and usable < needed:
            raise ConfigError(
                "kv-memory",
                f"{_mib(self.kv_memory_bytes)} hold {max(0, usable) * self.block_size} tokens, but "
                f"one request of max-model-len ({self.model_len(model)}) tokens needs "
                f"{_mib((needed + 1) * one.bytes_per_block)}; raise it, or lower --max-model-len",
            )
        return KVCacheConfig.for_model(model, num_blocks=usable + 1, block_size=self.block_size)


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


_AT_LEAST_ONE = (
    *("num_prefill", "num_decode", "block_size", "kv_memory_bytes"),
    *("max_num_seqs", "max_num_batched_tokens"),
)
_FLAGS = {"num_prefill": "prefill", "num_decode": "decode", "kv_memory_bytes": "kv-memory"}


def _flag(name: str) -> str:
    return _FLAGS.get(name, name.replace("_", "-"))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
