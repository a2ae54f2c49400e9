"""What a node shows to a peer first: where it is, which process it is, what its pool is like."""

from __future__ import annotations

import hashlib
import hmac
import os
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from kv_transfer.layout import PeerPool
from kv_transfer.transport import PeerRefused

_DIGEST_SIZE = 32  # bytes
_HOST_ID_CHARS = 12

Text = Annotated[str, msgspec.Meta(max_length=256)]
Digest = Annotated[bytes, msgspec.Meta(min_length=_DIGEST_SIZE, max_length=_DIGEST_SIZE)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One process, in all time: a pid alone is given to another one day."""

    boot_id: Text
    pid_namespace: Natural  # inode
    network_namespace: Natural  # inode
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    start_time: Natural  # clock ticks after boot

    @classmethod
    def own(cls) -> ProcessIdentity:
        """This process, asked anew each time: it may be a fork."""
        pid = os.getpid()
        start_time = start_time_of(pid)
        assert start_time is not None
        return cls(
            boot_id=_boot_id(),
            pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
            network_namespace=os.stat("/proc/self/ns/net").st_ino,
            pid=pid,
            start_time=start_time,
        )

    @property
    def host_id(self) -> str:
        """Equal for processes that can reach each other's abstract sockets and see their pids."""
        place = f"{self.boot_id}/{self.pid_namespace}/{self.network_namespace}"
        return hashlib.sha256(place.encode()).hexdigest()[:_HOST_ID_CHARS]

    def sees_pids_of(self, other: ProcessIdentity) -> bool:
        mine, its = (self.boot_id, self.pid_namespace), (other.boot_id, other.pid_namespace)
        return mine == its


class Passport(msgspec.Struct, frozen=True, kw_only=True):
    """`extra` travels behind the passport, which is signed; so its digest is proof of it."""

    endpoint: Text
    pool: PeerPool
    process: ProcessIdentity
    num_descriptors: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0  # that come along
    extra_bytes: Natural = 0
    extra_digest: Digest = bytes(_DIGEST_SIZE)

    def check_extra(self, extra: bytes) -> None:
        """Raise PeerRefused if these are not the bytes that the peer meant to send."""
        if len(extra) != self.extra_bytes:
            raise PeerRefused(
                f"{self.endpoint} announced {self.extra_bytes} bytes about its transport, "
                f"but sent {len(extra)}"
            )
        if not hmac.compare_digest(digest_of(extra), self.extra_digest):
            raise PeerRefused(f"what {self.endpoint} sent about its transport is damaged")


def digest_of(extra: bytes) -> bytes:
    return hashlib.sha256(extra).digest()


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time_of(pid: int) -> int | None:
    """When the process started, in clock ticks after boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of the command is in parentheses, and may hold any of them.
    return int(stat.rpartition(b")")[2].split()[19])
