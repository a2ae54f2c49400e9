"""Who is alive, and who holds which blocks?"""

from directory.directory import (
    Directory,
    DirectoryError,
    Gap,
    NodeRecord,
    NotRegistered,
    StaleGeneration,
    Subscription,
)
from directory.memory import MemoryDirectory

__all__ = [
    "Directory",
    "DirectoryError",
    "Gap",
    "MemoryDirectory",
    "NodeRecord",
    "NotRegistered",
    "StaleGeneration",
    "Subscription",
]
