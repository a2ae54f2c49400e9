"""Bytes of all kinds thrown at the sockets of UCX, which by itself obeys everybody."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer import Extents
from kv_transfer.transports import nixl_agent, port_lock
from kv_transfer.transports.nixl_agent import (
    NixlAgent,
    NixlConfig,
    RemotePool,
    TransferState,
)
from kv_transfer.transports.port_lock import PortLock, PortTaken, Source, free_port, sources_to
from protocol import ConfigError
from tests.kv_transfer.conformance_end import usage
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, make_pool

NUM_BLOCKS = 33
UNTOUCHED, WRITTEN = 5, 7
NUM_PATIENT = 200  # strangers who stay
MAX_GROWTH_BYTES = 32 << 20
TURNS = 20  # of an agent, in which it reads all that has come

# Who connects to UCX says a number, and then puts bytes at an address.
MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
FRAME = struct.Struct("<BI")  # what, and how many bytes
PUT, PUT_HEADER = 33, struct.Struct("<QQI")  # address, number of bytes, serial number


def put(address: int, data: bytes) -> bytes:
    return FRAME.pack(PUT, PUT_HEADER.size) + PUT_HEADER.pack(address, len(data), 1) + data


class Target:
    """An agent to which others want to write."""

    def __init__(self, transports: str) -> None:
        config = NixlConfig(transports=transports)
        self.pool = make_pool(NUM_BLOCKS, fill=UNTOUCHED)
        self.agent = NixlAgent("target", self.pool, config)
        self.friend = NixlAgent("friend", make_pool(NUM_BLOCKS, fill=WRITTEN), config)
        self.friends = False

    def close(self) -> None:
        self.friend.close()
        self.agent.close()

    def progress(self) -> None:
        for _ in range(TURNS):
            self.agent.progress()

    def dial(self) -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", self.agent.port), TIMEOUT_S)
        opened.setblocking(False)
        return opened

    def attack(self, stranger: socket.socket) -> None:
        stranger.send(MAGIC + put(self.pool.address, b"\0" * 100))

    @property
    def untouched(self) -> bool:
        return bool((self.pool.bytes == UNTOUCHED).all())

    @property
    def connections(self) -> int:
        """That have been accepted."""
        return sum(
            bool(opened.raddr) and opened.laddr.port == self.agent.port
            for opened in psutil.Process().net_connections("tcp")
        )

    def make_friends(self) -> None:
        others = sources_to(self.agent.port)
        self.friend.add("target", self.agent.metadata())
        self.agent.admit(sources_to(self.agent.port) - others)
        self.friends = True

    def take_from_a_friend(self) -> None:
        """All blocks."""
        if not self.friends:
            self.make_friends()
        remote = RemotePool.on("cpu", "target", self.pool.address, self.pool.num_bytes)
        blocks = [(n, n) for n in range(NUM_BLOCKS)]
        rows = Extents.of_blocks(blocks, LAYOUT.bytes_per_block).rows
        transfer = self.friend.start(remote, rows)
        while transfer.state is TransferState.RUNNING:
            transfer.poll()
            self.agent.progress()
        assert transfer.state is TransferState.DONE
        assert (self.pool.bytes == WRITTEN).all()
        self.pool.bytes[:] = UNTOUCHED


@pytest.fixture(scope="module", params=["tcp", "all"])
def one_target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The same for all that is thrown at it."""
    target = Target(request.param)
    yield target
    target.close()


@pytest.fixture
def target(one_target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Who dials from this process is a stranger."""
    monkeypatch.setattr(port_lock, "sources_to", lambda port: frozenset[Source]())
    return one_target


noise = st.binary(max_size=2000)
frames = st.builds(
    lambda what, length, rest: MAGIC + FRAME.pack(what, length) + rest,
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    noise,
)
puts = st.builds(lambda at, data: MAGIC + put(at, data), st.integers(0, 2**64 - 1), noise)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=st.lists(noise | frames | puts | st.just(MAGIC), max_size=5))
def test_no_bytes_get_in(target: Target, said: list[bytes]) -> None:
    before = target.connections
    with target.dial() as stranger:
        for chunk in said:
            stranger.send(chunk)
        target.attack(stranger)
        target.progress()
        assert target.connections == before
    assert target.untouched


def test_a_friend_gets_in_however_many_strangers_wait(target: Target) -> None:
    before, memory = target.connections, psutil.Process().memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_PATIENT):
            target.attack(stack.enter_context(target.dial()))
        target.progress()
        assert target.connections == before
        assert target.untouched
        target.take_from_a_friend()
        assert target.untouched
    assert psutil.Process().memory_info().rss < memory + MAX_GROWTH_BYTES


def test_who_is_not_locked_out_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the attack of these tests is none."""
    monkeypatch.setattr(port_lock, "_attach", lambda listener, program: None)
    target = Target("tcp")
    with target.dial() as stranger:
        target.attack(stranger)
        until = time.monotonic() + TIMEOUT_S
        while target.untouched:
            assert time.monotonic() < until
            target.progress()
    target.close()


def test_datagrams_are_of_no_use(target: Target) -> None:
    """UCX's shared memory has sockets by which peers could wake each other."""
    names = {
        str(opened.laddr)
        for opened in psutil.Process().net_connections("unix")
        if opened.type == socket.SOCK_DGRAM and opened.laddr
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        for name in names:
            with contextlib.suppress(BlockingIOError):  # nobody reads
                for n in range(1000):
                    stranger.sendto(bytes(n % 64), "\0" + name.lstrip("@\0"))
    target.progress()
    assert target.untouched
    target.take_from_a_friend()


# ---------------------------------------------------------------------- before the lock is there


def test_an_agent_whose_port_was_found_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody connects as soon as UCX listens, and is not even read."""
    ports: list[int] = []

    def lock(port: int) -> PortLock:
        ports.append(port)
        if len(ports) > 1:
            return PortLock(port)
        own = sources_to(port)
        with monkeypatch.context() as patch, socket.create_connection(("127.0.0.1", port)):
            patch.setattr(port_lock, "sources_to", lambda port: own)
            return PortLock(port)

    monkeypatch.setattr(nixl_agent, "PortLock", lock)
    target = Target("tcp")
    assert ports[0] not in ports[1:]
    assert target.agent.port == ports[1]
    target.take_from_a_friend()
    target.close()


def test_who_always_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(port: int) -> PortLock:
        raise PortTaken("10.0.0.9:99 has connected")

    Target("tcp").close()  # what is made once
    before = usage()
    monkeypatch.setattr(nixl_agent, "PortLock", taken)
    with pytest.raises(ConfigError, match=r"strangers cannot be kept away.*10\.0\.0\.9:99"):
        Target("tcp")
    assert usage() == before


def test_a_port_that_was_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, between the choice and UCX's use of it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free_port(), free_port(), other.getsockname()[1]]
        monkeypatch.setattr(nixl_agent, "free_port", ports.pop)
        target = Target("tcp")
    target.take_from_a_friend()
    target.close()
