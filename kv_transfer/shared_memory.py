"""Memory that other processes can map: a file without a name, which ends with its last user."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from kv_transfer.memory_limits import tightest_limit
from kv_transfer.transport import PeerRefused
from protocol import ConfigError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Mapped as long as this object, or anything made from its `buffer`, lives.

    Of a fixed size: sealed, so that no process can cut it short while another uses it. Forks do
    not inherit it: they would keep it, and could write to it, when this process has ended.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """The descriptor is this object's once this has succeeded. Raises OSError, ValueError."""
        self.fd = -1
        self._map = mmap.mmap(fd, num_bytes)
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # this system has none for shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.num_bytes = num_bytes
        self.fd = fd  # for others to map it

    def __del__(self) -> None:
        self.close()

    @property
    def buffer(self) -> memoryview:
        """All of it, writable; for `numpy.frombuffer` and `torch.frombuffer`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Let nobody else map it. Who has, keeps it; harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def create(cls, num_bytes: int, *, field: str = "kv_memory_bytes") -> SharedMemory:
        """Zeros, which take up memory when they are first touched.

        Raises ConfigError, about `field`, if there is not so much memory.
        """
        _check_available(num_bytes, field)
        fd = os.memfd_create("kvrelay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, num_bytes)
        except (OSError, ValueError) as error:  # mmap says so of what is longer than any memory
            os.close(fd)
            raise ConfigError(
                field, f"{num_bytes} bytes of shared memory cannot be had: {error}"
            ) from error

    @classmethod
    def attach(cls, fd: int, num_bytes: int) -> SharedMemory:
        """Map what a peer has sent, and close the descriptor.

        Raises PeerRefused if that is not memory which holds, and will always hold, so many bytes.
        """
        try:
            _check_sealed(fd, num_bytes)
            attached = cls(fd, num_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise PeerRefused(f"the peer's memory cannot be mapped: {error}") from error
        except PeerRefused:
            os.close(fd)
            raise
        attached.close()
        return attached


def _check_available(num_bytes: int, field: str) -> None:
    limit = tightest_limit()
    if num_bytes > limit.available:
        raise ConfigError(
            field,
            f"{num_bytes} bytes of shared memory are needed, "
            f"but {limit.what} leaves {limit.available}",
        )


def _check_sealed(fd: int, num_bytes: int) -> None:
    """Raises PeerRefused, or OSError: this kind of file cannot be sealed at all."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise PeerRefused("the peer's memory is not sealed: it could be cut short while we write")
    size = os.fstat(fd).st_size
    if size < num_bytes:
        raise PeerRefused(f"the peer's memory has {size} bytes, but its pool {num_bytes}")
