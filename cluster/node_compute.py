"""What computes on a node, and who makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine import KVCacheConfig, StepRunner
from kv_transfer import BlockCopier
from protocol import Role


@dataclass(frozen=True)
class NodeCompute:
    """A runner, and the memory that its blocks are in."""

    runner: StepRunner
    kv_cache: KVCacheConfig
    address: int
    owner: object
    fd: int | None = None  # of the memory, if other processes may map it
    copier: BlockCopier | None = None  # of memory that is a GPU's


RunnerFactory = Callable[[Role], NodeCompute]  # for one node after the other
