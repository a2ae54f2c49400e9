"""What a directory is to the nodes that write to it and to the routers that read it.

    node                                directory                          router
    register(info, ttl_s) ───────────►  records, one a node  ───────────►  nodes()
    heartbeat(status) ───────────────►  (alive while younger than ttl_s)
    publish(batch) ──────────────────►  bounded queue, one a subscriber ►  drain()
    deregister(node_id) ─────────────►

All methods are plain, not `async`: a node calls from threads that have no event loop, and a
router needs answers in the middle of a decision. So what is on a hot path never waits for
anybody: `publish` takes the batch and returns, `nodes` and `drain` read what is already here.
An implementation over a network sends and receives in a thread of its own. Only `register` may
take a round trip, with a deadline; call it from a thread that can afford it.

A restarted node registers under the next generation. From then on the directory hears nothing
of the earlier one: its heartbeats are refused and no subscriber gets a batch of it any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol import BlockEventBatch, KvrelayError, NodeInfo, NodeStatus

DEFAULT_MAX_BATCHES = 4096


class DirectoryError(KvrelayError):
    """The directory cannot do what was asked."""

    label = "directory"


class NotRegistered(DirectoryError):
    """The directory does not know this node (any more): it should register again."""

    label = "not_registered"

    def __init__(self, node_id: str) -> None:
        super().__init__(f"node {node_id!r} is not registered")
        self.node_id = node_id


class StaleGeneration(DirectoryError):
    """A later generation of the node took its place. A restart takes `current + 1`."""

    label = "stale_generation"

    def __init__(self, node_id: str, generation: int, current: int) -> None:
        super().__init__(
            f"generation {generation} of node {node_id!r} is over: generation {current} registered"
        )
        self.node_id = node_id
        self.generation = generation
        self.current = current


class DirectoryUnavailable(DirectoryError):
    """The directory's server is away, and this cannot be done without it."""

    label = "directory_unavailable"


class AlreadyClaimed(DirectoryError):
    """Another one controls the cluster of this name."""

    label = "already_claimed"

    def __init__(self, name: str, owner: str, remaining_s: float) -> None:
        super().__init__(
            f"the cluster {name!r} is controlled by {owner} already "
            f"(unless renewed, for {remaining_s:.0f} s more)"
        )
        self.name = name
        self.owner = owner
        self.remaining_s = remaining_s


@dataclass(frozen=True)
class NodeRecord:
    """One registered node. It stays in the list when it goes silent, until it is deregistered.

    No node is dead because the directory could not be heard: `blind_s` of the age do not count.
    """

    info: NodeInfo
    status: NodeStatus | None  # None until the first heartbeat
    heartbeat_age_s: float  # since the last heartbeat, or else the registration
    ttl_s: float
    blind_s: float = 0.0  # of that age, how long the directory's own server was away

    @property
    def alive(self) -> bool:
        return self.heartbeat_age_s - self.blind_s <= self.ttl_s


@dataclass(frozen=True)
class Gap:
    """Batches of this node up to number `sequence` were lost to this subscriber."""

    node_id: str
    sequence: int


class Subscription(Protocol):
    """The block events of all nodes since the subscription, each node's in its own order."""

    def drain(self) -> list[BlockEventBatch | Gap]:
        """All that came since the last call; a `Gap` stands before what follows it."""

    def close(self) -> None:
        """Receive no more. Harmless when repeated."""


class Directory(Protocol):
    """Who is alive, and who holds which blocks. Safe to call from any thread."""

    def register(self, info: NodeInfo, *, ttl_s: float) -> None:
        """The node lives, and goes on to do so while its heartbeats are at most `ttl_s` apart.

        Registering the same generation again is harmless.

        Raises:
            StaleGeneration: a later generation has registered before.
        """

    def heartbeat(self, status: NodeStatus, *, generation: int) -> None:
        """The node still lives, and this is how it does.

        Raises:
            NotRegistered: the node has to register (again).
            StaleGeneration: a later generation has registered since.
        """

    def deregister(self, node_id: str, *, generation: int) -> None:
        """Forget the node. Harmless if it is unknown or if a later generation took its place."""

    def nodes(self) -> tuple[NodeRecord, ...]:
        """All registered nodes, ordered by id, dead ones included."""

    def publish(self, batch: BlockEventBatch, *, generation: int) -> None:
        """Hand the batch to all subscribers. Never blocks.

        It is dropped unless the node is registered under this generation: the engine thread that
        calls could do nothing about it, and the next heartbeat tells the node.
        """

    def subscribe(self, *, max_batches: int = DEFAULT_MAX_BATCHES) -> Subscription:
        """All batches from now on. More than `max_batches` undrained: the oldest become gaps."""

    def close(self) -> None:
        """Tell what there is to tell, and let go of all that is held. Harmless when repeated.

        It deregisters nobody.
        """
