"""An end with the shm transport, for the conformance suite."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.peering import ClusterToken
from kv_transfer.shared_memory import SharedMemory
from kv_transfer.transports.shm import ShmTransport
from tests.kv_transfer.conformance_end import EndSpec, Parts
from tests.kv_transfer.pools import GatedPool

TOKEN = ClusterToken("a secret of the tests")


@dataclass(frozen=True)
class SharedPool(GatedPool):
    """Its owner is the memory, with its descriptor."""

    def __post_init__(self) -> None:
        assert isinstance(self.owner, SharedMemory)


def make_shared_pool(spec: EndSpec) -> SharedPool:
    memory = SharedMemory.create(spec.num_blocks * spec.layout.bytes_per_block)
    return SharedPool(spec.layout, memory.address, spec.num_blocks, memory, memory.fd)


def make_parts(spec: EndSpec) -> Parts:
    pool = make_shared_pool(spec)
    return Parts(ShmTransport(spec.name, TOKEN, copy=pool.copy_extents), pool)
