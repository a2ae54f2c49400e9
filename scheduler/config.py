"""What bounds a step and the cache. Validated once, frozen, named as vLLM names it.

docs/scheduler.md says of each knob what happens when it is too small or too large.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any, Literal

from protocol import HASH_BLOCK_SIZE, ConfigError

Policy = Literal["fcfs", "priority"]
LoadFailurePolicy = Literal["recompute", "fail"]
SpecMethod = Literal["ngram", "draft_model", "eagle"]

_LONG_PREFILL_SHARE = 0.04  # of max_model_len: the threshold if partial prefills are limited

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SchedulerKnobs:
    """What can be chosen without knowing the model.

    Raises:
        ConfigError: a value is out of range, or two of them cannot go together.
    """

    # The three sizes of a batch are sequences, tokens, and KV (the block pool).
    max_num_seqs: int = 64  # running requests
    max_num_batched_tokens: int = 512  # tokens that the runner can take in a step
    max_num_scheduled_tokens: int | None = None  # tokens given out in a step; None: the same

    # How prompts are cut.
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # most tokens of one request in a step; 0: no limit
    max_num_partial_prefills: int | None = None  # requests amid their prompt; None: no limit
    max_long_partial_prefills: int | None = None  # ... with more to compute than the threshold

    # Who goes first, and who has to make room.
    policy: Policy = "fcfs"
    waiting_preempts_running: bool = False  # policy priority: strictly lower ones make room
    scheduler_reserve_full_isl: bool = True  # admit only what would fit as a whole

    # Loads of remote KV.
    max_parked_blocks: int | None = None  # blocks reserved for loads under way; None: no limit
    kv_load_failure_policy: LoadFailurePolicy = "recompute"

    # For runners with adapters, and with draft tokens.
    max_loras: int | None = None  # different adapters in a step; None: no limit
    spec_method: SpecMethod | None = None
    num_speculative_tokens: int = 0  # drafts for each request and step

    async_scheduling: bool | None = None  # plan step n+1 while step n runs; None: the node decides

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _at_least_one(name, getattr(self, name))
        for name in _OPTIONAL_LIMITS:
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        _one_of("policy", self.policy, ("fcfs", "priority"))
        _one_of("kv_load_failure_policy", self.kv_load_failure_policy, ("recompute", "fail"))
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                "long_prefill_token_threshold",
                f"must be at least 0, not {self.long_prefill_token_threshold}",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that each running "
                f"request can decode in a step, not {self.max_num_batched_tokens}",
            )
        if self.token_budget > self.max_num_batched_tokens:
            raise ConfigError(
                "max_num_scheduled_tokens",
                f"must be at most max_num_batched_tokens ({self.max_num_batched_tokens}), "
                f"not {self.token_budget}",
            )
        if self.waiting_preempts_running and self.policy != "priority":
            raise ConfigError("waiting_preempts_running", "needs the policy priority")
        self._check_partial_prefills()
        self._check_drafts()

    def _check_partial_prefills(self) -> None:
        limit, long_limit = self.max_num_partial_prefills, self.max_long_partial_prefills
        if limit is not None and limit > 1 and not self.enable_chunked_prefill:
            raise ConfigError("max_num_partial_prefills", f"{limit} needs chunked prefill")
        if limit is not None and long_limit is not None and long_limit > limit:
            raise ConfigError(
                "max_long_partial_prefills",
                f"must be at most max_num_partial_prefills ({limit}), not {long_limit}",
            )

    def _check_drafts(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ConfigError(
                "num_speculative_tokens", f"must be at least 0, not {self.num_speculative_tokens}"
            )
        if self.spec_method is None:
            if self.num_speculative_tokens:
                raise ConfigError("num_speculative_tokens", "needs a spec_method")
            return
        _one_of("spec_method", self.spec_method, ("ngram", "draft_model", "eagle"))
        _at_least_one("num_speculative_tokens", self.num_speculative_tokens)
        if self.async_scheduling:
            raise ConfigError(
                "async_scheduling",
                "must be off with draft tokens: they are known only when the step before has run",
            )

    def plans_ahead(self, usual: bool) -> bool:
        """`async_scheduling`, and where that is unset: as `usual`, but never with draft tokens."""
        if self.async_scheduling is None:
            return usual and self.spec_method is None
        return self.async_scheduling

    @property
    def token_budget(self) -> int:
        """Tokens given out in a step."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return self.max_num_scheduled_tokens

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots that a model which makes drafts fills beyond the scheduled tokens."""
        return 0 if self.spec_method == "ngram" else self.num_speculative_tokens

    @property
    def limits_partial_prefills(self) -> bool:
        return (self.max_num_partial_prefills or self.max_long_partial_prefills) is not None


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerKnobs):
    """The knobs of a step, and the longest request that the model takes.

    Raises:
        ConfigError: a value is out of range, or two of them cannot go together.
    """

    async_scheduling: bool = True  # here it is decided
    max_model_len: int = 2048  # prompt + output of a request

    @classmethod
    def of(
        cls, knobs: SchedulerKnobs, *, plans_ahead: bool = True, **changes: Any
    ) -> SchedulerConfig:
        """The same knobs, for a model; `changes` name fields of this class.

        `plans_ahead`: what `async_scheduling` is where the knobs leave it unset.
        """
        values = {field.name: getattr(knobs, field.name) for field in fields(SchedulerKnobs)}
        values["async_scheduling"] = knobs.plans_ahead(plans_ahead)
        return cls(**(values | changes))

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one("max_model_len", self.max_model_len)
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                "long_prefill_token_threshold",
                f"must be from 0 to max_model_len ({self.max_model_len}), "
                f"not {self.long_prefill_token_threshold}",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_model_len ({self.max_model_len}) when chunked prefill is "
                f"off, so that the longest prompt fits into a step, "
                f"not {self.max_num_batched_tokens}",
            )
        if not self.enable_chunked_prefill and self.token_budget < self.max_model_len:
            raise ConfigError(
                "max_num_scheduled_tokens",
                f"must be at least max_model_len ({self.max_model_len}) when chunked prefill is "
                f"off, so that a preempted request can be resumed, not {self.token_budget}",
            )
        if self.max_num_batched_tokens > self.max_num_seqs * self.max_model_len:
            logger.warning(
                "max_num_batched_tokens (%d) exceeds max_num_seqs * max_model_len (%d): "
                "a step can never be so large",
                self.max_num_batched_tokens,
                self.max_num_seqs * self.max_model_len,
            )

    @property
    def prefill_threshold(self) -> int:
        """Most tokens of one request in a step, and what makes a prefill a long one; 0: no limit.

        With several partial prefills at once and no threshold of its own, it is 4 % of the
        longest request, as it was in the release of vLLM that had this limit.
        """
        several = self.max_num_partial_prefills is None or self.max_num_partial_prefills > 1
        if self.long_prefill_token_threshold or not (self.limits_partial_prefills and several):
            return self.long_prefill_token_threshold
        return max(1, int(self.max_model_len * _LONG_PREFILL_SHARE))


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


_OPTIONAL_LIMITS = (
    "max_num_scheduled_tokens",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "max_parked_blocks",
    "max_loras",
)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(name, f"must be at least 1, not {value}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(name, f"must be {' or '.join(known)}, not {value!r}")
