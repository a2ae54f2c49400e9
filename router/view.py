"""What a routing policy may know of the cluster: pure data, the same input for the same choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from protocol import NodeInfo, NodeStatus
from router.config import RouterConfig


@dataclass(frozen=True)
class NodeLoad:
    """Work that was sent to a node and that its last status does not show yet."""

    queued_tokens: int = 0  # to prefill
    blocks: int = 0  # that will be taken from what the status shows as free or cached
    requests: int = 0

    def __add__(self, other: NodeLoad) -> NodeLoad:
        return NodeLoad(
            self.queued_tokens + other.queued_tokens,
            self.blocks + other.blocks,
            self.requests + other.requests,
        )


@dataclass(frozen=True)
class Contact:
    """A connection to a node."""

    info: NodeInfo  # of the generation that it leads to
    heard_age_s: float  # since anything came over it


@dataclass(frozen=True)
class NodeView:
    """One node as the router sees it now."""

    info: NodeInfo
    status: NodeStatus | None  # None: it has not told yet
    load: NodeLoad = NodeLoad()
    status_age_s: float = 0.0
    alive: bool = True  # its heartbeats are not overdue
    connected: bool = True  # jobs can be sent to this generation of it
    silence_s: float = 0.0  # since any sign of life
    ttl_s: float = math.inf  # of its registration: what silence is too long
    step_s: float = 0.0  # measured, while it has something to do; 0: not lately

    @property
    def node_id(self) -> str:
        return self.info.node_id

    @property
    def num_requests(self) -> int:
        """Requests on the node in whatever state, those on their way included."""
        status = self.status
        if status is None:
            return self.load.requests
        waiting = status.num_waiting + status.num_skipped_waiting + status.num_intake
        return status.num_running + waiting + self.load.requests

    @property
    def available_blocks(self) -> int:
        """Blocks that nobody uses or has been promised; below 0 if promises exceed the pool."""
        if self.status is None:
            return 0
        return self.status.blocks.free + self.status.blocks.cached - self.load.blocks

    @property
    def max_request_tokens(self) -> int:
        """Tokens before the next one that a request can have and ever be served here."""
        return min(self.info.max_model_len, self.info.num_blocks * self.info.block_size) - 1


@dataclass(frozen=True)
class RouterView:
    """The cluster at the instant of a decision."""

    nodes: tuple[NodeView, ...]
    fingerprint: str  # of the model that is served; other nodes do not count
    config: RouterConfig = field(default_factory=RouterConfig)
    turn: int = 0  # decisions made before this one
