"""A request as the scheduler sees it: tokens, how many of them are computed, and a status."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from protocol import BlockHash, FinishReason, SamplingParams, extend_hashes, root_hash


class RequestStatus(enum.Enum):
    """
    WAITING ──► RUNNING ──► FINISHED_*
       │  ▲        │
       │  │        └──► PREEMPTED ──► RUNNING
       ▼  │
    WAITING_FOR_REMOTE_KVS
    """

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def finished(self) -> bool:
        return self in _REASONS


_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class Request:
    """Tokens and their progress.

        all_token_ids   | prompt ................ | output (forced, then sampled) |
                        0      num_computed_tokens ^                     num_tokens ^

    There is no prefill or decode phase: each step lets `num_computed_tokens` catch up with
    `num_tokens`.
    """

    __slots__ = (
        "_hash_root",
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "hash_block_size",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_forced_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "output_token_ids",
        "priority",
        "request_id",
        "sampling",
        "status",
        "stop_token_id",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        forced_token_ids: Sequence[int] = (),
        lora_name: str | None = None,
        cache_salt: str | None = None,
        hash_block_size: int = 16,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.arrival_time = arrival_time
        self.priority = priority
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_forced_tokens = len(forced_token_ids)
        self.output_token_ids: list[int] = list(forced_token_ids)
        self.all_token_ids: list[int] = [*prompt_token_ids, *forced_token_ids]
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prefix hit when first admitted
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.stop_token_id: int | None = None
        self.hash_block_size = hash_block_size
        self._hash_root = root_hash(lora_name=lora_name, cache_salt=cache_salt)
        self.block_hashes: list[BlockHash] = []  # one for each full hash block
        self._extend_hashes()

    def append_output(self, token_id: int) -> None:
        """Take a token that was sampled, here or on the node that did the prefill."""
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)
        if len(self.all_token_ids) % self.hash_block_size == 0:
            self._extend_hashes()

    def _extend_hashes(self) -> None:
        extend_hashes(self.block_hashes, self._hash_root, self.all_token_ids, self.hash_block_size)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        return _REASONS.get(self.status)

    @property
    def num_given_tokens(self) -> int:
        """Tokens that came with the request: the prompt and forced output."""
        return self.num_prompt_tokens + self.num_forced_tokens

    @property
    def urgency(self) -> tuple[int, float, str]:
        """Smaller is served first under the priority policy."""
        return (self.priority, self.arrival_time, self.request_id)

    def finishing_status(self, max_len: int) -> RequestStatus | None:
        """Whether the newest output token ends the request, and how.

        Below `min_tokens` nothing does; a stop token at the last position counts as a stop.
        """
        sampling = self.sampling
        if len(self.output_token_ids) < sampling.min_tokens:
            return None
        last = self.output_token_ids[-1]
        if last in sampling.eos_token_ids:
            return RequestStatus.FINISHED_STOPPED
        if last in sampling.stop_token_ids:
            self.stop_token_id = last
            return RequestStatus.FINISHED_STOPPED
        if len(self.all_token_ids) >= max_len:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        if len(self.output_token_ids) >= sampling.max_tokens:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed)"
        )
