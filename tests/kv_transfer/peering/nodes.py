"""Nodes that speak with each other in one process, and strangers who speak with them by hand."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kv_transfer import PeerPool
from kv_transfer.peering import (
    ClusterToken,
    Medium,
    Passport,
    PeeringConfig,
    PeerNetwork,
    ProcessIdentity,
    TcpMedium,
    UnixMedium,
)
from kv_transfer.peering.frames import Frames, frame
from kv_transfer.peering.handshake import Handshake, Identity, Met
from kv_transfer.peering.passport import digest_of
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S

R = TypeVar("R")

SECRET = "what only the nodes of this cluster know"
TOKEN = ClusterToken(SECRET)
POOL = PeerPool(layout=LAYOUT, num_blocks=3)
MEDIA: dict[str, Callable[[], Medium]] = {
    "unix": lambda: UnixMedium("shm"),
    "tcp": lambda: TcpMedium("nixl"),
}


class Node:
    """A network, and an event that its `on_activity` sets."""

    def __init__(
        self,
        name: str,
        medium: Medium,
        *,
        token: ClusterToken = TOKEN,
        config: PeeringConfig | None = None,
        extra: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        self.network = PeerNetwork(name, medium, token, config or PeeringConfig())
        self.activity = threading.Event()
        self.network.start(POOL, self.activity.set, extra=extra, descriptors=descriptors)

    @property
    def endpoint(self) -> str:
        return self.network.endpoint

    def until(self, condition: Callable[[], R]) -> R:
        """What is true at last. Looks only when told that it is worth while."""
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            self.activity.clear()
            if found := condition():
                return found
            left = give_up - time.monotonic()
            assert self.activity.wait(max(0.0, left)), "nothing happened, or nobody told"

    def connected(self, peer: str) -> Passport:
        self.network.connect(peer)
        passport = self.until(lambda: self.network.passport(peer))
        assert passport is not None
        return passport

    def lost(self) -> tuple[str, Exception]:
        losses = self.until(self.network.lost_peers)
        assert len(losses) == 1
        return losses[0]

    def received(self, count: int) -> list[bytes]:
        messages: list[bytes] = []

        def enough() -> bool:
            messages.extend(received.data for received in self.network.receive())
            return len(messages) >= count

        self.until(enough)
        return messages


def identity(
    endpoint: str, *, token: ClusterToken = TOKEN, extra: bytes = b"", num_descriptors: int = 0
) -> Identity:
    """That of a node which is nothing but a test."""
    passport = Passport(
        endpoint=endpoint,
        pool=POOL,
        process=ProcessIdentity.own(),
        num_descriptors=num_descriptors,
        extra_bytes=len(extra),
        extra_digest=digest_of(extra),
    )
    return Identity(token, passport, extra, max_extra_bytes=1 << 20)


class Stranger:
    """One end of a connection, spoken by hand. Blocks, but not for ever."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.socket.settimeout(TIMEOUT_S)
        self._frames = Frames(1 << 30)

    @classmethod
    def dial(cls, endpoint: str) -> Stranger:
        address = address_of(endpoint)
        family = socket.AF_UNIX if isinstance(address, bytes) else socket.AF_INET
        opened = socket.socket(family)
        opened.settimeout(TIMEOUT_S)
        opened.connect(address)
        return cls(opened)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, data: bytes) -> None:
        """The other end may have closed already."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def say_framed(self, message: bytes) -> None:
        self.say(frame(message))

    def say_no_more(self) -> None:
        """The other end may have closed already."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def hear(self) -> bytes | None:
        """The next whole message; None: the other end has closed."""
        while (message := self._frames.next()) is None:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames.add(data)
        return message

    def wait_for_end(self) -> list[bytes]:
        """What is said before the other end closes."""
        messages = []
        while (message := self.hear()) is not None:
            messages.append(message)
        return messages

    def shake_hands(self, handshake: Handshake) -> Met:
        """Raises as the handshake does; EOFError: the other end closed instead of answering."""
        said = next(handshake)
        while True:
            self.say(said.data)
            message = self.hear()
            if message is None:
                raise EOFError
            try:
                said = handshake.send(message)
            except StopIteration as end:
                met: Met = end.value
                self.say(met.welcome)
                return met


class StrangeListener:
    """Listens where a node might."""

    def __init__(self, medium: Medium) -> None:
        self._listener, self.endpoint = medium.listen(f"stranger-{os.urandom(4).hex()}")
        self._listener.setblocking(True)
        self._listener.settimeout(TIMEOUT_S)

    def __enter__(self) -> StrangeListener:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def accept(self) -> Stranger:
        opened, _ = self._listener.accept()
        return Stranger(opened)


def address_of(endpoint: str) -> bytes | tuple[str, int]:
    scheme, _, rest = endpoint.partition(":")
    place, _, name = rest.partition("/")
    if scheme == "shm":
        return b"\0kvrelay/" + name.encode()
    host, _, port = place.rpartition(":")
    return host, int(port)
