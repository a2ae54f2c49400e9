"""Tells a directory in this process what a node does."""

from __future__ import annotations

from dataclasses import dataclass

from directory import Directory
from protocol import BlockEventBatch, NodeInfo, NodeStatus

NODE_TTL_S = 30.0  # a step may take a second; a node silent for so long is not well


@dataclass(frozen=True)
class DirectoryListener:
    """A `Listener` that hands on to a directory; the node has to be registered there."""

    directory: Directory

    def register(self, info: NodeInfo) -> None:
        self.directory.register(info, ttl_s=NODE_TTL_S)

    def deregister(self, info: NodeInfo) -> None:
        self.directory.deregister(info.node_id, generation=info.generation)

    def on_status(self, info: NodeInfo, status: NodeStatus) -> None:
        self.directory.heartbeat(status, generation=info.generation)

    def on_blocks(self, info: NodeInfo, batch: BlockEventBatch) -> None:
        self.directory.publish(batch, generation=info.generation)
