"""What has to outlive the controller's process, in Ray's own key-value store."""

from __future__ import annotations

import itertools

import msgspec
from ray.experimental import internal_kv

from cluster.directory_config import DirectoryAddress
from cluster.ray_mode.spec import namespace
from protocol import Role

_STORE = b"kvrelay"  # the namespace in Ray's store


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster as it was told to be last."""

    nodes: dict[str, Role]
    gateways: tuple[str, ...]  # the first one is where the controller is
    directory: DirectoryAddress
    directory_port: int = 0  # of the embedded one, which keeps it when it is started again

    @property
    def counts(self) -> dict[Role, int]:
        roles = list(self.nodes.values())
        return {role: roles.count(role) for role in Role if role in roles}

    @property
    def new_gateway(self) -> str:
        """The first number that none has."""
        numbers = (f"gateway-{number}" for number in itertools.count())
        return next(name for name in numbers if name not in self.gateways)

    def ids_of(self, role: Role) -> list[str]:
        """The oldest numbers first."""
        ids = [node_id for node_id, its in self.nodes.items() if its is role]
        return sorted(ids, key=lambda node_id: int(node_id.rpartition("-")[2]))

    def new_ids(self, role: Role, count: int) -> list[str]:
        """The first numbers that nobody has. None at all for a `count` below 1."""
        candidates = (f"{role}-{number}" for number in range(len(self.nodes) + count))
        free = (node_id for node_id in candidates if node_id not in self.nodes)
        return list(itertools.islice(free, max(0, count)))


class MemoryStore:
    """Of the cluster of this name."""

    def __init__(self, name: str) -> None:
        self._key = namespace(name).encode()

    def load(self) -> Memory | None:
        data = internal_kv._internal_kv_get(self._key, namespace=_STORE)
        return None if data is None else msgspec.msgpack.decode(data, type=Memory)

    def save(self, memory: Memory) -> None:
        data = msgspec.msgpack.encode(memory)
        internal_kv._internal_kv_put(self._key, data, overwrite=True, namespace=_STORE)

    def forget(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=_STORE)
