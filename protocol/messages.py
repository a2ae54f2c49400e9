"""What a router sends to nodes, and what nodes send back."""

from __future__ import annotations

import enum

import msgspec

from protocol.block_hash import BlockHash
from protocol.request import GenerationRequest
from protocol.sampling import TokenLogprobs
from protocol.timeline import Timeline


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class HandoffTicket(msgspec.Struct, frozen=True):
    """Names one hand-off. A retry of the same request is another generation."""

    request_id: str
    generation: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.generation}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a request on one node.

    `emitted` are the output tokens that the client already has: they are forced, count as
    output, and the next token is sampled at position `len(emitted)`.
    """

    request: GenerationRequest
    caller: str  # names the output stream that gets the deltas
    attempt: int = 0
    emitted: tuple[int, ...] = ()

    @property
    def ticket(self) -> HandoffTicket:
        return HandoffTicket(self.request.request_id, self.attempt)


class PrefillJob(Job, frozen=True, kw_only=True):
    """Compute the KV of the prompt, sample one token, push both to `decode_endpoint`.

    If tokens are emitted already, no other is sampled: the last of them goes with the KV of all
    before it. So the decode node needs the same blocks, whether or not the first token was told.
    Without an endpoint nothing is pushed: the request ends with the next token.
    """

    decode_endpoint: str | None = None


class DecodeJob(Job, frozen=True, kw_only=True):
    """Generate to the end. With `prefill_endpoint`, the KV and the first token come from there.

    An older attempt that waits on this node for the same KV is taken over, with the blocks that it
    has, if its prefill node can write to them no more. If not, it ends.
    Without one this node computes the prompt itself (a unified node, or a prompt so short or
    so well cached that a hand-off would cost more).
    """

    prefill_endpoint: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """Why an attempt failed: the label of an error class, a message, and whether to try again."""

    label: str
    message: str
    retryable: bool


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New output tokens of one attempt. The first of them is output token number `position`.

    `logprobs` has one entry for each of them, if the request asks for that.

    The last delta of an attempt has a `finish_reason`; a prefill node's last delta of a
    request that goes on elsewhere has `handed_off` instead.
    """

    request_id: str
    attempt: int
    position: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, if one of stop_token_ids did
    handed_off: bool = False
    failure: Failure | None = None
    timeline: Timeline | None = None  # the instants that this node saw, with its last delta
    num_cached_tokens: int | None = None  # prefix hit of this attempt, with its first delta
    logprobs: tuple[TokenLogprobs, ...] = ()


class OutputBatch(msgspec.Struct, frozen=True):
    """All deltas of one caller that one step of one node made."""

    node_id: str
    deltas: tuple[Delta, ...]


class BlockStored(msgspec.Struct, frozen=True, tag="stored"):
    """These blocks can be hit from now on. Each follows the one before; the first, `parent`."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None


class BlockRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """These blocks can no longer be hit."""

    hashes: tuple[BlockHash, ...]


class CacheCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing can be hit any more."""


BlockEvent = BlockStored | BlockRemoved | CacheCleared


class BlockEventBatch(msgspec.Struct, frozen=True):
    """The cache changes of one step. `sequence` counts up by one; a gap asks for a snapshot."""

    node_id: str
    sequence: int
    events: tuple[BlockEvent, ...]


class CacheSnapshot(msgspec.Struct, frozen=True):
    """All blocks that can be hit, as of event batch `sequence`.

    `parents` has one entry for each hash: the block before it, or None for the first of a chain.
    """

    node_id: str
    sequence: int
    hashes: tuple[BlockHash, ...]
    parents: tuple[BlockHash | None, ...]
