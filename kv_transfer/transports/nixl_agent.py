"""NIXL, as far as it is used here: agents that write runs of bytes into each other's pools.

Nothing but this file touches NIXL. What it does not say in its documentation, and was measured
with release 1.5.1 over UCX:

* bytes that a writer has handed to its kernel still land after it was killed, or has released the
  handle, and also where the target has deregistered the memory: as soon as the target's agent
  makes progress. Only when that agent is closed, nothing lands any more;
* without `progress` of the target, writes over TCP stay under way for ever;
* the TCP port of an agent takes connections from anybody, who then can write to the process's
  memory; also where writers prefer another way, they need this one to get to know each other;
* a datagram from anybody to one of the sockets of its shared memory ends the process. Nobody needs
  these sockets where agents make progress by themselves;
* the calls that copy do so outside the interpreter lock.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import importlib
import importlib.metadata
import ipaddress
import logging
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.layout import BlockPoolMemory
from kv_transfer.transport import PeerRefused
from kv_transfer.transports.port_lock import (
    PortLock,
    PortTaken,
    Source,
    deafen,
    free_port,
    is_free,
    own_sockets,
)
from protocol import ConfigError, KvrelayError

_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")  # by what CUDA the wheel was built for
_SIOCGIFADDR = 0x8915
_ALL_DEVICES = "all"
_IDLE_CALL_S = 100e-6  # one that finds nothing takes 2 to 5 microseconds, or 50 after a rest
_CANNOT_BE_SPLIT = "name one, or `all`"
_PORTS_TRIED = 5


class AgentBroken(KvrelayError):
    """NIXL gave up what it was asked for."""

    label = "agent_broken"


@dataclass(frozen=True, kw_only=True)
class NixlConfig:
    """Where UCX may send bytes. Loopback alone, unless told otherwise.

    Raises:
        ConfigError: something cannot be; names the setting.
    """

    bind: str = "127.0.0.1"  # the address for messages
    device: str | None = None  # as UCX names it: eth0, mlx5_0:1, or all; None: that of `bind`
    transports: str = "all"  # the UCX_TLS of UCX; one word, such as all, tcp, ^sm

    def __post_init__(self) -> None:
        for name, value in (("nixl_device", self.device), ("nixl_transports", self.transports)):
            if value is not None and (not value or set(value) & {",", "="}):
                raise ConfigError(name, f"{value!r} cannot be passed on; {_CANNOT_BE_SPLIT}")

    @property
    def engine_config(self) -> str:
        """As NIXL passes it to UCX."""
        settings = [f"TLS={self.transports}"]
        device = self.device or _device_of(self.bind)
        if device != _ALL_DEVICES:
            settings.append(f"NET_DEVICES={device}")
        return ",".join(settings)

    def check_reaches(self, device: str) -> None:
        """Raise ConfigError if UCX, so restricted, cannot touch memory of this device.

        It copies out of and into a GPU by `cuda_copy` and `cuda_ipc`, which are transports too.
        """
        by_name = self.transports != "all" and not self.transports.startswith("^")
        if device != "cpu" and (by_name or "cuda" in self.transports):
            raise ConfigError(
                "nixl_transports",
                f"{self.transports!r} leaves out what UCX needs for memory of {device}; "
                "leave it at `all`, or leave out one that is not for CUDA, such as ^sm",
            )


def _device_of(address: str) -> str:
    """The network device that has this address."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            return name
    raise ConfigError("nixl_device", f"no network device has the address {address}; name one")


def _address_of(device: str) -> str | None:
    """Its IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", device.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


@dataclass(frozen=True)
class Nixl:
    """The library. `version` has to be that of the peers."""

    module: Any
    errors: tuple[type[Exception], ...]
    version: str


@cache
def load_nixl() -> Nixl:
    """Raises ConfigError: it is not installed, or cannot be loaded here."""
    for name in _MODULES:
        try:
            module = _import_quietly(name)
        except ModuleNotFoundError as error:
            if error.name == name:
                continue
            raise ConfigError("transport", f"nixl cannot be loaded: {error}") from error
        except ImportError as error:
            raise ConfigError("transport", f"nixl cannot be loaded: {error}") from error
        bindings = importlib.import_module(f"{name}._bindings")
        errors = tuple(
            value
            for value in vars(bindings).values()
            if isinstance(value, type) and issubclass(value, Exception)
        )
        return Nixl(module, errors, importlib.metadata.version(name.replace("_", "-")))
    raise ConfigError("transport", "nixl is not installed; pip install 'kvrelay[nixl]'")


def _import_quietly(name: str) -> Any:
    """It writes to stdout, and changes how this process reports errors of its own log handlers."""
    raises = logging.raiseExceptions
    module = importlib.import_module(name)
    logging.raiseExceptions = raises
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return module


@dataclass(frozen=True)
class RemotePool:
    """Where a peer lets us write, through the agent that it made for us."""

    agent: str
    memory: str  # DRAM or VRAM
    device_id: int
    address: int
    num_bytes: int

    @classmethod
    def on(cls, device: str, agent: str, address: int, num_bytes: int) -> RemotePool:
        """Raises PeerRefused: it is of no known device."""
        return cls(agent, *_memory_of(device), address, num_bytes)


class TransferState(enum.Enum):
    """
    RUNNING ──► DONE
       └──────► BROKEN
    """

    RUNNING = enum.auto()
    DONE = enum.auto()  # every byte is in the peer's memory
    BROKEN = enum.auto()  # some bytes may still land, as long as the peer's agent is open


class NixlAgent:
    """Knows one pool. Not to be used from two threads at once.

    Raises:
        ConfigError: UCX finds no such device, its port cannot be locked, or the pool's memory
            cannot be registered.
    """

    def __init__(self, name: str, pool: BlockPoolMemory, config: NixlConfig) -> None:
        self.name = name
        self._nixl = load_nixl()
        self._pool = pool
        self._memory, self._device_id = _memory_of(pool.device)
        self._agent, self._lock = self._open_locked(config)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._lock.close)
            self._registered = self._register()
            on_failure.pop_all()

    def _open_locked(self, config: NixlConfig) -> tuple[Any, PortLock]:
        """Nothing that came before the lock is ever read: an agent reads when it makes progress."""
        problem: Exception | None = None
        for _ in range(_PORTS_TRIED):
            try:
                return self._open_on(free_port(), config)
            except (PortTaken, OSError) as error:
                problem = error
        raise ConfigError(
            "transport", f"strangers cannot be kept away from the sockets of UCX: {problem}"
        ) from problem

    def _open_on(self, port: int, config: NixlConfig) -> tuple[Any, PortLock]:
        before = own_sockets()
        try:
            agent = self._open(f"{config.engine_config},TCP_PORT_RANGE={port}-{port}")
        except ConfigError as error:
            if is_free(port):
                raise
            raise PortTaken(f"port {port} is in use") from error
        deafen(before)
        return agent, PortLock(port)

    def _open(self, engine_config: str) -> Any:
        module = self._nixl.module
        # A thread of NIXL's own would burn a core.
        settings = module.nixl_agent_config(enable_prog_thread=False, backends=[])
        try:
            agent = module.nixl_agent(self.name, settings)
            agent.create_backend("UCX", {"engine_config": engine_config})
        except self._nixl.errors as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                "nixl_device",
                f"UCX cannot use {engine_config} here ({error}); devices: {there}",
            ) from error
        return agent

    @property
    def port(self) -> int:
        """Where it waits for peers to connect; 0, if it does so by no TCP port."""
        return self._lock.port

    def admit(self, sources: Collection[Source]) -> None:
        """Let a peer connect from there; nobody else can. Raises OSError: it cannot be."""
        self._lock.admit(sources)

    def close_behind(self) -> None:
        """Who was admitted has connected, if it ever does."""
        self._lock.close_behind()

    def _register(self) -> Any:
        pool = self._pool
        rows = np.array([[pool.address, pool.num_bytes, self._device_id]], dtype=np.uint64)
        try:
            return self._agent.register_memory(rows, self._memory)
        except self._nixl.errors as error:
            raise ConfigError(
                "transport",
                f"nixl cannot register {pool.num_bytes} bytes of {pool.device}: {error}; "
                "RDMA needs a memlock limit (ulimit -l) above that",
            ) from error

    def metadata(self) -> bytes:
        """With which peers can write to the pool."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add(self, agent: str, metadata: bytes) -> None:
        """Learn of a peer's agent. The metadata have to be whole. Raises PeerRefused."""
        try:
            named = self._agent.add_remote_agent(metadata)
        except self._nixl.errors as error:
            raise PeerRefused(f"the metadata of agent {agent} are of no use: {error}") from error
        if named != agent.encode():
            raise PeerRefused(f"the metadata of agent {agent} are those of {named!r}")

    def start(self, remote: RemotePool, rows: NDArray[np.int64]) -> NixlTransfer:
        """Write extents. Memory of one host may be copied at once, before this returns."""
        sources = self._descriptors(rows[:, 0], rows[:, 2], self._pool.address, self._device_id)
        targets = self._descriptors(rows[:, 1], rows[:, 2], remote.address, remote.device_id)
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(sources, self._memory),
                self._agent.get_xfer_descs(targets, remote.memory),
                remote.agent,
            )
        except self._nixl.errors as error:
            return NixlTransfer(self._agent, self._nixl, None, str(error))
        transfer = NixlTransfer(self._agent, self._nixl, handle)
        transfer.post()
        return transfer

    @staticmethod
    def _descriptors(
        offsets: NDArray[np.int64], sizes: NDArray[np.int64], base: int, device_id: int
    ) -> NDArray[np.uint64]:
        """[num_extents, 3]: address, bytes, device."""
        rows = np.empty((len(offsets), 3), dtype=np.uint64)
        rows[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
        rows[:, 1] = sizes
        rows[:, 2] = device_id
        return rows

    @property
    def num_bytes(self) -> int:
        """Of the pool."""
        return self._pool.num_bytes

    def progress(self) -> bool:
        """Let bytes of peers in that are on their way. Whether there seem to be any.

        Raises AgentBroken.
        """
        begin = time.perf_counter()
        try:
            self._agent.get_new_notifs()
        except self._nixl.errors as error:
            raise AgentBroken(f"agent {self.name}: {error}") from error
        return time.perf_counter() - begin > _IDLE_CALL_S

    def close(self) -> None:
        """Nothing is read from or written to the pool through this agent any more.

        Except by a process of this host that copies by itself at this moment.
        """
        try:
            self._agent.deregister_memory(self._registered)
        except self._nixl.errors as error:
            logging.getLogger(__name__).debug("agent %s: %s", self.name, error)
        self._lock.close()
        del self._registered, self._agent  # the last reference: its sockets are closed


class NixlTransfer:
    """One write. Has to be released before its agent is closed."""

    def __init__(self, agent: Any, nixl: Nixl, handle: Any, problem: str = "") -> None:
        self.problem = problem
        self.state = TransferState.BROKEN if problem else TransferState.RUNNING
        self._agent = agent
        self._nixl = nixl
        self._handle = handle

    def post(self) -> None:
        self._advance(self._agent.transfer)

    def poll(self) -> bool:
        """Move on, and see. Whether something seems to have moved."""
        begin = time.perf_counter()
        self._advance(self._agent.check_xfer_state)
        return time.perf_counter() - begin > _IDLE_CALL_S

    def _advance(self, step: Any) -> None:
        try:
            status = step(self._handle)
        except self._nixl.errors as error:
            self.problem = str(error)
            status = "ERR"
        if status == "PROC":
            return
        if status == "DONE":
            self.state = TransferState.DONE
        else:
            self.problem = self.problem or status
            self.state = TransferState.BROKEN
        self.release()

    def release(self) -> None:
        """Forget it. Does not stop a write under way."""
        if self._handle is None:
            return
        try:
            self._handle.release()
        except self._nixl.errors as error:
            logging.getLogger(__name__).debug("a handle cannot be released: %s", error)
        self._handle = self._agent = None


def check_version(peer: str, version: str) -> None:
    """Raise PeerRefused if agents of this version and ours do not understand each other."""
    ours = load_nixl().version
    if version != ours:
        raise PeerRefused(f"{peer} has NIXL {version}, this node {ours}")


def _memory_of(device: str) -> tuple[str, int]:
    """The kind of memory, and the number of the device. Raises PeerRefused: neither."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return "DRAM", 0
    if kind == "cuda" and (number or "0").isdecimal():
        return "VRAM", int(number or 0)
    raise PeerRefused(f"nixl knows no device {device!r}")
