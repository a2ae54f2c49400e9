"""Tells a directory in this process what a node does."""

from __future__ import annotations

from dataclasses import dataclass, field

from directory import Directory
from protocol import BlockEventBatch, NodeInfo, NodeStatus

NODE_TTL_S = 30.0  # a step may take a second; a node silent for so long is not well


@dataclass(frozen=True)
class DirectoryListener:
    """A `Listener` that hands on to a directory; the node has to be registered there.

    A node that has changed its role is told of once it is registered as what it is now.
    """

    directory: Directory
    ttl_s: float = NODE_TTL_S
    _generations: dict[str, int] = field(default_factory=dict, repr=False)  # that are registered

    def register(self, info: NodeInfo) -> None:
        self.directory.register(info, ttl_s=self.ttl_s)
        self._generations[info.node_id] = info.generation

    def deregister(self, info: NodeInfo) -> None:
        self.directory.deregister(info.node_id, generation=info.generation)

    def on_status(self, info: NodeInfo, status: NodeStatus) -> None:
        if info.generation <= self._generations.get(info.node_id, info.generation):
            self.directory.heartbeat(status, generation=info.generation)

    def on_blocks(self, info: NodeInfo, batch: BlockEventBatch) -> None:
        self.directory.publish(batch, generation=info.generation)
