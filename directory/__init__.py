"""Who is alive, and who holds which blocks?"""

from directory.directory import (
    AlreadyClaimed,
    Directory,
    DirectoryError,
    DirectoryUnavailable,
    Gap,
    NodeRecord,
    NotRegistered,
    StaleGeneration,
    Subscription,
)
from directory.embedded import EmbeddedServer, ServerStartFailed
from directory.memory import MemoryDirectory
from directory.redis_config import RedisConfig
from directory.redis_directory import RedisDirectory

__all__ = [
    "AlreadyClaimed",
    "Directory",
    "DirectoryError",
    "DirectoryUnavailable",
    "EmbeddedServer",
    "Gap",
    "MemoryDirectory",
    "NodeRecord",
    "NotRegistered",
    "RedisConfig",
    "RedisDirectory",
    "ServerStartFailed",
    "StaleGeneration",
    "Subscription",
]
