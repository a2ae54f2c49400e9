"""What a node can do, as its callers see it.

Two things implement these protocols: the node object itself (local mode) and a handle on a
node in another process. Nothing is sent per token: each caller has one output stream per
node, with one batch a step.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from protocol.messages import CacheSnapshot, DecodeJob, OutputBatch, PrefillJob


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class PauseMode(enum.StrEnum):
    """What a paused node still does."""

    WAIT = "wait"  # running requests go on, nobody is admitted
    KEEP = "keep"  # nothing is computed, everything stays where it is


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a node lives."""

    node_id: str
    role: Role
    model: str
    fingerprint: str  # of the model's weights and configuration
    endpoint: str  # of the KV transport; two nodes may hand off if their schemes agree
    service: str = ""  # where other processes reach this interface; empty: nowhere
    block_size: int  # tokens
    num_blocks: int  # usable ones
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    generation: int = 0  # of the node: a restarted one registers under the next


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the usable blocks of a node are. The five others add up to `total`, always."""

    total: int
    free: int  # no user, nothing that could be hit
    cached: int  # no user, can be hit
    used: int  # held by a request or by a hand-off that is under way
    quarantined: int  # of no request any more, but a peer might still write to them

    @property
    def balanced(self) -> bool:
        return self.used + self.cached + self.free + self.quarantined == self.total


class TransferDirection(enum.StrEnum):
    PUSH = "push"
    RECEIVE = "receive"


class LiveTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a hand-off that is under way, as that end sees it."""

    ticket: str
    direction: TransferDirection
    peer: str  # endpoint
    state: str  # of the state machine
    reason: str | None  # if it has ended and only waits for its blocks to be safe
    tokens: int  # to be handed over; 0: not known yet
    tokens_moved: int = 0  # at the pushing end
    bytes: int = 0  # at the pushing end
    blocks: int = 0  # reserved, at the receiving end
    quarantined: bool = False  # nobody wants those blocks, but the peer might write to them
    age_s: float
    deadline_s: float  # from now; negative: over


class TransferCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-offs of a node since it started, in its own role's view."""

    active: int = 0
    committed: int = 0
    aborted: int = 0
    expired: int = 0
    failed: int = 0
    blocks: int = 0  # pushed
    bytes: int = 0  # pushed
    seconds: float = 0.0  # from the first byte to the commit, of those that were committed
    reasons: dict[str, int] = {}  # ended hand-offs by reason, if they were not committed
    outcomes: dict[str, int] = {}  # failed ones by what was done: retry, recompute, fail
    # At D, those that went on with another P, by what became of the blocks that were reserved:
    # kept; queued, if there were none yet; given_up, if the old P might still write to them.
    retargeted: dict[str, int] = {}
    live: tuple[LiveTransfer, ...] = ()  # the oldest ones


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What changes with every step."""

    node_id: str
    role: Role
    healthy: bool
    draining: bool
    num_running: int
    num_waiting: int
    num_skipped_waiting: int
    num_intake: int  # decode jobs whose prefill has not started
    queued_tokens: int  # prompt tokens that are not computed yet
    prefill_tokens_per_s: float  # measured; 0 until something was
    blocks: BlockCounts
    transfers: TransferCounts
    num_preemptions: int
    num_prefix_queries: int  # tokens looked up in the prefix cache
    num_prefix_hits: int  # tokens found there
    num_prompt_tokens_computed: int
    num_prompt_tokens_loaded: int  # arrived through a hand-off
    num_prompt_tokens_recomputed: int  # computed again after a preemption
    num_generated_tokens: int
    num_steps: int
    paused: PauseMode | None = None
    admitting: bool = True  # False: too many blocks are in quarantine


class Node(Protocol):
    """What prefill and decode nodes have in common."""

    @property
    def info(self) -> NodeInfo: ...

    async def cancel(self, request_id: str) -> None:
        """Abort the request if the node knows it; blocks are freed as soon as that is safe."""

    async def status(self) -> NodeStatus: ...

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new jobs and return when the ones under way have ended.

        Those that have not after `timeout_s` fail with the label of NodeDraining, and may be tried
        elsewhere; None: wait for all. Of several deadlines the earliest counts. Returns early if
        the node ends, or is told to take jobs again. A caller that does not wait so long leaves
        the node draining.
        """

    async def undrain(self) -> None:
        """Take jobs again. Whoever waits for the drain is not kept waiting."""

    async def change_role(self, role: Role) -> NodeInfo:
        """Drain, become a node of this role with the same cache, and take jobs again.

        It is the next generation of the node, which is to be registered by whoever registered it.
        Returns when all jobs under way have ended; `drain` first, if they are not to be waited for.
        If it has the role already, nothing happens.

        Raises:
            ConfigError: the settings of the two roles differ in what a node cannot change.
            Overloaded: the node was told to take jobs again, or to change otherwise, meanwhile.
            NodeLost: it does not run any more.
        """

    async def snapshot(self) -> CacheSnapshot: ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns when it is so; a step that runs already is computed to its end."""

    async def resume(self) -> None:
        """Go on, if the node is paused."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget everything that can be hit; False, and nothing is forgotten, if blocks are in use.

        With `reset_running_requests` those that run start over, and keep their tokens.
        """

    def outputs(self, caller: str) -> AsyncIterator[OutputBatch]:
        """The stream of all deltas of `caller`'s requests. It ends when the node does."""


class PrefillNode(Node, Protocol):
    async def prefill(self, job: PrefillJob) -> None:
        """Take the job or raise; the answer comes through `outputs`.

        Raises:
            PromptTooLong: it can never fit.
            Overloaded: the node's queue is full, or it drains (NodeDraining), or it is no node of
                this role any more (WrongRole).
        """


class DecodeNode(Node, Protocol):
    async def decode(self, job: DecodeJob) -> None:
        """Take the job or raise, as `PrefillNode.prefill` does."""
