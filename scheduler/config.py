"""What bounds a step and the cache. Validated once, frozen, named as vLLM names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol import HASH_BLOCK_SIZE, ConfigError

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The knobs of a step.

    Raises:
        ConfigError: a value is out of range, or two of them cannot go together.
    """

    max_num_seqs: int = 64  # running requests
    max_num_batched_tokens: int = 512  # tokens that the runner can take in a step
    max_num_scheduled_tokens: int | None = None  # tokens given out in a step; None: the same
    max_model_len: int = 2048  # prompt + output of a request
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # most tokens of one request in a step; 0: no limit
    policy: Policy = "fcfs"
    scheduler_reserve_full_isl: bool = True  # admit only what would fit as a whole
    max_parked_blocks: int | None = None  # blocks reserved for loads under way; None: no limit

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _at_least_one(field, getattr(self, field))
        for optional in ("max_num_scheduled_tokens", "max_parked_blocks"):
            if getattr(self, optional) is not None:
                _at_least_one(optional, getattr(self, optional))
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError("policy", f"must be fcfs or priority, not {self.policy!r}")
        if not 0 <= self.long_prefill_token_threshold <= self.max_model_len:
            raise ConfigError(
                "long_prefill_token_threshold",
                f"must be from 0 to max_model_len ({self.max_model_len}), "
                f"not {self.long_prefill_token_threshold}",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that each running "
                f"request can decode in a step, not {self.max_num_batched_tokens}",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_model_len ({self.max_model_len}) when chunked prefill is "
                f"off, so that the longest prompt fits into a step, "
                f"not {self.max_num_batched_tokens}",
            )

    @property
    def token_budget(self) -> int:
        """Tokens given out in a step."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return self.max_num_scheduled_tokens


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The geometry of the block pool. Block 0 is the null block and is never handed out.

    Raises:
        ConfigError: a value is out of range, or two of them cannot go together.
    """

    num_blocks: int  # with the null block
    block_size: int = 16  # tokens
    enable_prefix_caching: bool = True
    hash_block_size: int = HASH_BLOCK_SIZE  # tokens; of which block_size is a multiple

    def __post_init__(self) -> None:
        _at_least_one("block_size", self.block_size)
        _at_least_one("hash_block_size", self.hash_block_size)
        if self.num_blocks < 2:
            raise ConfigError(
                "num_blocks", f"must be at least 2 (one is the null block), not {self.num_blocks}"
            )
        if self.block_size % self.hash_block_size:
            raise ConfigError(
                "block_size",
                f"must be a multiple of {self.hash_block_size} (the unit of block hashes), "
                f"not {self.block_size}",
            )

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_usable_tokens(self) -> int:
        return self.num_usable_blocks * self.block_size


def _at_least_one(field: str, value: int) -> None:
    if value < 1:
        raise ConfigError(field, f"must be at least 1, not {value}")
