"""A KV connector has two sides: the scheduler's (`protocol.SchedulerConnector`) and the worker's.

The scheduler side decides and only keeps books. The worker side moves bytes: it is given the
orders that go with a step, and says what has ended.
"""

from __future__ import annotations

from typing import Protocol

from kv_transfer.layout import BlockPoolMemory
from protocol import KVConnectorOutput, SchedulerConnector


class KVConnector(SchedulerConnector, Protocol):
    """Both sides; a node has one object for them, used from its engine's thread only."""

    def register_kv_caches(self, pool: BlockPoolMemory) -> None:
        """This pool is read from and written to from now on."""

    def start_load_kv(self, meta: object) -> None:
        """Carry out the orders of a step, without waiting, before the step is computed.

        All earlier steps have been computed. Only from here on may a peer write to blocks that were
        reserved while this step was planned: until then an earlier step may have written to them.
        """

    def poll(self) -> None:
        """Move on whatever can move on, without waiting. Also called while a step is computed."""

    def get_finished(self) -> KVConnectorOutput:
        """The loads and sends that have ended since the last call."""

    def shutdown(self) -> None:
        """Stop all transfers; returns when nobody touches the pool any more."""
