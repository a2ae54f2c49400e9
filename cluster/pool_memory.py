"""The memory of a node's KV pool, where it has to be of a particular kind."""

from __future__ import annotations

from cluster.config import LocalConfig
from cluster.transfer_config import TransportChoice
from kv_transfer.shared_memory import SharedMemory


def pool_memory(config: LocalConfig, num_bytes: int) -> SharedMemory | None:
    """For one node. None: any memory will do.

    Raises:
        ConfigError: there is not so much.
    """
    if config.processes or config.transport is TransportChoice.SHM:
        return SharedMemory.create(num_bytes)
    return None
