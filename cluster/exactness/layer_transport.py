"""The memory transport of a node that is watched: does KV leave before its step has ended?"""

from __future__ import annotations

from cluster.exactness.watched_runner import WatchedRunner
from kv_transfer import Extents, MemoryHub, MemoryTransport
from kv_transfer.transports.copy_thread import CopyWrite
from protocol import HandoffTicket


class LayerTransport(MemoryTransport):
    """`runner` is the node's own."""

    def __init__(self, hub: MemoryHub, name: str, runner: WatchedRunner) -> None:
        super().__init__(hub, name)
        self.num_early = 0  # writes
        self._watched = runner

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> CopyWrite:
        self.num_early += self._watched.is_computing(ticket.request_id)
        return super().write(peer, ticket, extents)
