"""The seam between the gateway and whatever generates tokens for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from protocol.messages import FinishReason
from protocol.nodes import NodeInfo, NodeStatus, PauseMode
from protocol.request import GenerationRequest
from protocol.sampling import TokenLogprobs
from protocol.timeline import Timeline


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens in order, none missing, none twice, whatever happened to nodes.

    `logprobs` has one entry for each token, if the request asks for that.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None  # set in the last chunk only
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class TokenStream(Protocol):
    """The answer to one request while it is made.

    Iterating raises `RequestFailed` (or one of its kinds) if the request ends unhappily.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def timeline(self) -> Timeline: ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first node had in its prefix cache."""

    def __aiter__(self) -> AsyncIterator[TokenChunk]: ...

    async def aclose(self) -> None:
        """Stop now: abort on all nodes and free everything. Harmless after the end."""


class NodeReport(msgspec.Struct, frozen=True):
    """One node in the cluster status. `status` is None if it did not answer in time."""

    info: NodeInfo
    status: NodeStatus | None


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All that `/cluster`, `/health` and `/metrics` are made of."""

    nodes: tuple[NodeReport, ...]
    num_requests: int  # admitted and not ended
    decisions: dict[str, int]  # routing decisions by kind, since the start
    retries: dict[str, int]  # attempts after the first, by the label of what failed
    rejected: dict[str, int]  # requests not admitted, by error label


class Backend(Protocol):
    """What generates tokens for a gateway."""

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Admit the request and start it.

        Raises:
            InvalidRequest: no node could ever serve it.
            Overloaded: too much is queued already.
            NoHealthyNode: there is none for a role that is needed.
        """

    async def status(self) -> ClusterStatus: ...

    async def pause(self, mode: PauseMode) -> dict[str, bool]:
        """Pause all nodes; whether each of them is paused now."""

    async def resume(self) -> dict[str, bool]:
        """Let all nodes go on; whether each of them does."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> dict[str, bool]:
        """Forget what can be hit on all nodes; whether each of them has."""
