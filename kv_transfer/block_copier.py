"""The seam to memory that this process can address, but the CPU cannot: that of a GPU."""

from __future__ import annotations

from typing import Protocol

from kv_transfer.extents import Extents
from kv_transfer.geometry import Runs


class BlockCopier(Protocol):
    """Copies out of, and within, the memory of one device. Handed in by who allocated it.

    What is read has been written: a copier does not wait for what the device computes, only for its
    own copies. Any thread may use it.
    """

    def enter_thread(self) -> None:
        """This thread is about to call libraries that look for the device's context in it."""

    def read(self, address: int, runs: Runs) -> memoryview:
        """The bytes of these (offset, bytes) runs of the pool at `address`, one after the other."""

    def copy(self, extents: Extents, our_address: int, their_address: int) -> None:
        """From our pool into another one on the same device; returns when all is there."""
