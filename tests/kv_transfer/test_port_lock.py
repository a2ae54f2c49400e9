"""A port that lets in only who is named, tried with the kernel's own connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from kv_transfer.transports import port_lock
from kv_transfer.transports.port_lock import (
    MAX_SOURCES,
    PortLock,
    PortTaken,
    Source,
    free_port,
    sources_to,
)
from tests.kv_transfer.conformance_end import usage
from tests.kv_transfer.pools import TIMEOUT_S

QUIET_S = 0.3  # in which the kernel has sent again what was dropped


class Server:
    """As a library would have it: it accepts whatever comes."""

    def __init__(self, host: str) -> None:
        self.socket = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        self.port: int = self.socket.getsockname()[1]
        self.host = host

    def dial(self, source: Source | None = None) -> socket.socket:
        client = socket.socket(self.socket.family)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.settimeout(TIMEOUT_S)
        if source is not None:
            client.bind(source)
        client.connect((self.host, self.port))
        return client

    def accepted(self, timeout_s: float = TIMEOUT_S) -> socket.socket:
        self.socket.settimeout(timeout_s)
        return self.socket.accept()[0]

    def accepts_nobody(self) -> bool:
        try:
            self.accepted(QUIET_S).close()
        except TimeoutError:
            return True
        return False


def source_of(client: socket.socket) -> Source:
    return client.getsockname()[:2]


def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process are to be strangers."""
    monkeypatch.setattr(port_lock, "sources_to", lambda port: frozenset())


both_families = pytest.mark.parametrize("server", ["127.0.0.1", "::1"], indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    hidden(monkeypatch)
    server = Server(getattr(request, "param", "127.0.0.1"))
    yield server
    server.socket.close()


@pytest.fixture
def lock(server: Server) -> Iterator[PortLock]:
    lock = PortLock(server.port)
    yield lock
    lock.close()


@both_families
def test_a_stranger_is_never_accepted(server: Server, lock: PortLock) -> None:
    with server.dial() as stranger:
        stranger.sendall(b"let me in")
        assert server.accepts_nobody()


@both_families
def test_who_is_named_is_accepted_and_nothing_it_has_said_is_lost(
    server: Server, lock: PortLock
) -> None:
    with server.dial() as stranger, server.dial() as friend:
        stranger.sendall(b"stranger")
        friend.sendall(b"friend")
        lock.admit([source_of(friend)])
        with server.accepted() as accepted:
            assert accepted.recv(100) == b"friend"
            friend.sendall(b"more")
            assert accepted.recv(100) == b"more"
        assert server.accepts_nobody()


@both_families
@pytest.mark.parametrize("place", [0, 1, MAX_SOURCES - 1])
def test_one_of_many_is_let_in(server: Server, lock: PortLock, place: int) -> None:
    with server.dial() as friend:
        address, port = source_of(friend)
        others = {(address, other) for other in range(2, MAX_SOURCES + 2) if other != port}
        named = [*sorted(others)[:place], (address, port), *sorted(others)[place:]]
        lock.admit(named[:MAX_SOURCES])
        server.accepted().close()


def test_the_same_port_of_another_address_is_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden(monkeypatch)
    server = Server("127.0.0.1")
    lock = PortLock(server.port)
    with server.dial(("127.0.0.2", 0)) as other:
        _, port = source_of(other)
        lock.admit([("127.0.0.1", port), ("127.0.0.3", port), ("::1", port)])
        assert server.accepts_nobody()
        lock.admit([("127.0.0.2", port)])
        server.accepted().close()
    lock.close()
    server.socket.close()


@both_families
def test_nobody_follows_who_has_connected(server: Server, lock: PortLock) -> None:
    with server.dial() as friend:
        source = source_of(friend)
        lock.admit([source])
        accepted = server.accepted()
        lock.close_behind()
        friend.sendall(b"still here")
        assert accepted.recv(100) == b"still here"
        accepted.close()
        assert friend.recv(1) == b""
    with server.dial(source) as follower:
        follower.sendall(b"me too")
        assert server.accepts_nobody()


def test_who_has_not_connected_yet_may_still_come(server: Server, lock: PortLock) -> None:
    source = (server.host, free_port())
    lock.admit([source])
    lock.close_behind()
    with server.dial(source):
        server.accepted().close()


def test_a_process_may_connect_to_itself() -> None:
    server = Server("127.0.0.1")
    with server.dial() as before:
        accepted = server.accepted()
        lock = PortLock(server.port)
        with server.dial() as after, accepted:
            assert {source_of(before), source_of(after)} <= sources_to(server.port)
            lock.admit(())
            server.accepted().close()
    lock.close()
    server.socket.close()


def test_somebody_was_there_before_the_lock(server: Server) -> None:
    with server.dial() as stranger, server.accepted():
        before = usage()
        with pytest.raises(PortTaken, match=str(source_of(stranger)[1])):
            PortLock(server.port)
        assert usage() == before


def test_somebody_waits_to_be_accepted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_lock, "_QUEUE_TIMEOUT_S", 0.05)
    with server.dial():
        with pytest.raises(PortTaken, match="waiting"):
            PortLock(server.port)
        server.accepted().close()


def test_other_ports_are_left_alone(server: Server, lock: PortLock) -> None:
    other = Server(server.host)
    with other.dial():
        other.accepted().close()
    other.socket.close()


def test_nothing_listens_there() -> None:
    lock = PortLock(free_port())
    assert lock.port == 0
    lock.admit([("127.0.0.1", 1)])
    lock.close_behind()
    lock.close()


@pytest.mark.parametrize(
    "sources",
    [[("127.0.0.1", n) for n in range(MAX_SOURCES + 1)], [("nowhere", 1)], [("::1::", 1)]],
)
def test_what_cannot_be_admitted_changes_nothing(
    server: Server, lock: PortLock, sources: list[Source]
) -> None:
    with server.dial() as friend:
        with pytest.raises(OSError, match=r"sources|illegal"):
            lock.admit(sources)
        lock.admit([source_of(friend)])
        server.accepted().close()


def test_sockets_of_others_survive_a_look_at_them() -> None:
    """While threads open and close some, none is closed or kept open by looking."""
    stop = threading.Event()
    problems: list[OSError] = []

    def open_and_close() -> None:
        while not stop.is_set():
            try:
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    ours.sendall(b"x")
                    theirs.recv(1)
            except OSError as error:
                problems.append(error)

    before = usage()
    threads = [threading.Thread(target=open_and_close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        with contextlib.suppress(PortTaken):
            PortLock(free_port()).close()
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert usage() == before
