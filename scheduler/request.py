"""A request as the scheduler sees it: tokens, how many of them are computed, and a status."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

from protocol import (
    HASH_BLOCK_SIZE,
    BlockHash,
    FinishReason,
    SamplingParams,
    extend_hashes,
    root_hash,
)

Urgency = tuple[int, float, str]


class RequestStatus(enum.Enum):
    """
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
       │
       ▼
    WAITING ──► RUNNING ──► FINISHED_*
       │  ▲        │
       │  │        └──► PREEMPTED ──► RUNNING
       ▼  │
    WAITING_FOR_REMOTE_KVS
    """

    WAITING = ("waiting", None)
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = ("waiting for its grammar", None)
    WAITING_FOR_REMOTE_KVS = ("waiting for remote KV", None)
    RUNNING = ("running", None)
    PREEMPTED = ("preempted", None)
    FINISHED_STOPPED = ("stopped", FinishReason.STOP)
    FINISHED_LENGTH_CAPPED = ("length capped", FinishReason.LENGTH)
    FINISHED_ABORTED = ("aborted", FinishReason.ABORT)
    FINISHED_ERROR = ("error", FinishReason.ERROR)

    def __init__(self, _words: str, finish_reason: FinishReason | None) -> None:
        self.finish_reason = finish_reason
        self.finished = finish_reason is not None


class Request:
    """Tokens and their progress.

        all_token_ids   | prompt ................ | output (forced, then sampled) |
                        0      num_computed_tokens ^                     num_tokens ^
        to be computed                            | spec_token_ids (drafts) | follow num_tokens
                                                  | num_output_placeholders |

    There is no prefill or decode phase: each step lets `num_computed_tokens` catch up with
    `num_tokens`, the drafts included. A placeholder is a token that a step in flight will sample:
    it may be computed by the next step before anybody here knows it.
    """

    __slots__ = (
        "_hash_root",
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "hash_block_size",
        "lora_name",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_forced_tokens",
        "num_hashed_blocks",
        "num_output_placeholders",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "output_token_ids",
        "priority",
        "request_id",
        "sampling",
        "spec_token_ids",
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
        hash_block_size: int = HASH_BLOCK_SIZE,
        awaits_grammar: bool = False,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.arrival_time = arrival_time
        self.priority = priority
        self.lora_name = lora_name
        self.cache_salt = cache_salt
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_forced_tokens = len(forced_token_ids)
        self.output_token_ids: list[int] = list(forced_token_ids)
        # Packed: cheap to copy and to hash, and nothing that a garbage collection has to visit.
        self.all_token_ids = array("I", prompt_token_ids)
        self.all_token_ids.extend(forced_token_ids)
        self.spec_token_ids: Sequence[int] = ()
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_prefill_tokens = 0  # that it had when it was admitted: its prefill ends there
        self.num_cached_tokens: int | None = None  # prefix hit when first admitted
        self.num_preemptions = 0
        self.status = (
            RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            if awaits_grammar
            else RequestStatus.WAITING
        )
        self.stop_token_id: int | None = None
        # Its block table, and how many blocks of it can be hit: the KV cache manager's to change.
        self.block_ids: list[int] = []
        self.num_hashed_blocks = 0
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
    def num_tokens_with_spec(self) -> int:
        """The drafts included."""
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.status.finish_reason

    @property
    def num_given_tokens(self) -> int:
        """Tokens that came with the request: the prompt and forced output."""
        return self.num_prompt_tokens + self.num_forced_tokens

    @property
    def prefilling(self) -> bool:
        """Whether tokens that it had when it was admitted are not computed yet."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def urgency(self) -> Urgency:
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

    def surely_ends(self, max_len: int) -> bool:
        """Whether the tokens that steps in flight sample end it, whatever they are."""
        num_output = len(self.output_token_ids) + self.num_output_placeholders
        return num_output >= self.sampling.min_tokens and (
            num_output >= self.sampling.max_tokens
            or len(self.all_token_ids) + self.num_output_placeholders >= max_len
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed)"
        )
