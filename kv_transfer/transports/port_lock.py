"""Keeps strangers away from the sockets of a library that asks nobody for a token.

The kernel drops every segment from a source that has not been let in, before the library hears of
it. A source is told by a peer over a connection that has proved the token:

    P                                          D
    connect() to the library's port ──SYN──►    a half-open connection, of which nobody is told
    "I come from (address, port)"  ═token═►     admit()
    ACK, sent once more            ────────►    accept()

The SYN alone is let through, as P learns its own port only by connecting. Without that, P's system
would wait for a second before it asks again; so it is 0.2 s. Whoever is not let in can hold nothing
but a place in the kernel's queue of half-open connections, which is bounded.

By a classic BPF filter (linux/filter.h), for which no privilege is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

Source = tuple[str, int]  # the address and port from which somebody connects
T = TypeVar("T")

MAX_SOURCES = 64  # of one port; the kernel limits the memory of a filter (net.core.optmem_max)

_SO_ATTACH_FILTER = 26
_LOAD_BYTE, _LOAD_HALF, _LOAD_WORD, _AND, _IF_EQUAL, _RETURN = 0x30, 0x28, 0x20, 0x54, 0x15, 0x06
_IP_HEADER = 0xFFF00000  # offsets from here on count from the IP header, others from that of TCP
# Where it stands there.
_SOURCE_ADDRESS: dict[int, int] = {socket.AF_INET: 12, socket.AF_INET6: 8}
_TCP_FLAGS, _SYN, _ACK = 13, 0x02, 0x10
_PASS, _DROP = 0xFFFFFFFF, 0
_ACCEPT_QUEUE = slice(24, 28)  # in tcp_info of a socket that listens: tcpi_unacked
_QUEUE_TIMEOUT_S = 5.0


class PortTaken(Exception):
    """Somebody else uses the port, or has connected before the lock was there."""


class PortLock:
    """On all of this process's sockets that listen on `port`; there may be none.

    Lets in what this process has itself connected to the port. Has to be closed before the sockets
    are.

    Raises:
        PortTaken: a stranger was faster. Nothing that it has said may be listened to.
        OSError: this kernel attaches no filters.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listeners = [socket.socket(fileno=fd) for fd in _own_sockets(_listener_on(port))]
        self._sources: frozenset[Source] = frozenset()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.admit(())
            self._check_nobody_is_in()
            on_failure.pop_all()

    @property
    def port(self) -> int:
        """0, if nothing listens there."""
        return self._port if self._listeners else 0

    def admit(self, sources: Collection[Source]) -> None:
        """These too, from now on. Raises OSError: something is no address, or they are too many."""
        self._let_in(self._sources.union(sources, sources_to(self._port)))

    def close_behind(self) -> None:
        """Who has connected needs to be let in no more, and another must not come from there."""
        if self._sources:
            self._let_in(self._sources.difference(_collect(_accepted_on(self._port))))

    def _let_in(self, sources: frozenset[Source]) -> None:
        if len(sources) > MAX_SOURCES:
            raise OSError(f"{len(sources)} sources, more than {MAX_SOURCES}")
        for listener in self._listeners:
            _attach(listener, _filter_of(listener.family, sources))
        self._sources = sources

    def _check_nobody_is_in(self) -> None:
        """The library's own thread takes connections off the queue; then they are among ours."""
        give_up = time.monotonic() + _QUEUE_TIMEOUT_S
        while any(_queue_of(listener) for listener in self._listeners):
            if time.monotonic() > give_up:
                raise PortTaken("connections are waiting to be accepted")
            time.sleep(0.001)
        time.sleep(0.001)  # from off the queue to a descriptor
        for source in _collect(_accepted_on(self._port)):
            if source not in self._sources:
                raise PortTaken(f"{source[0]}:{source[1]} has connected")
        self.close_behind()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


def own_sockets() -> frozenset[str]:
    """What the kernel calls those that this process has now."""
    return frozenset(name for _, name in _descriptors())


def deafen(known: frozenset[str]) -> None:
    """Sockets that were opened since `known`, and take datagrams from anybody, hear no more.

    Those with a name that the kernel has chosen, which nobody can have been told. Raises OSError.
    """
    opened = (socket.socket(fileno=fd) for fd in _own_sockets(_has_a_chosen_name, known))
    for receiver in opened:
        with receiver:
            _attach(receiver, [(_RETURN, 0, 0, _DROP)])
            with contextlib.suppress(BlockingIOError):
                while True:  # what came before
                    receiver.recv(1, socket.MSG_DONTWAIT)


def _has_a_chosen_name(opened: socket.socket) -> bool:
    return (
        opened.family == socket.AF_UNIX
        and opened.type & socket.SOCK_DGRAM != 0
        and re.fullmatch(rb"\0[0-9a-f]{5}", opened.getsockname() or b"") is not None
    )


def free_port() -> int:
    """Which nobody uses at this moment."""
    with socket.socket() as any_socket:
        any_socket.bind(("", 0))
        port: int = any_socket.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    with socket.socket() as any_socket:
        try:
            any_socket.bind(("", port))
        except OSError:
            return False
        return True


def sources_to(port: int) -> frozenset[Source]:
    """From where this process has connected to this port of any host.

    Connections that the other end's system has not answered yet cannot be seen.
    """

    def source(opened: socket.socket) -> Source | None:
        if opened.family not in _SOURCE_ADDRESS or not opened.type & socket.SOCK_STREAM:
            return None
        try:
            to = opened.getpeername()
        except OSError:  # not connected
            return None
        return _source(opened.getsockname()) if to[1] == port else None

    return frozenset(_collect(source))


def _source(address: tuple[str, int]) -> Source:
    return address[0].partition("%")[0], address[1]


# ---------------------------------------------------------------------- sockets of this process


def _collect(look: Callable[[socket.socket], T | None]) -> list[T]:
    """What there is to be seen at them, where that is not None."""
    return [found for _, found in _seen(look)]


def _own_sockets(
    wanted: Callable[[socket.socket], bool], known: frozenset[str] = frozenset()
) -> list[int]:
    """Duplicates of those that are wanted."""
    return [os.dup(fd) for fd, found in _seen(wanted, known) if found]


def _seen(
    look: Callable[[socket.socket], T | None], known: frozenset[str] = frozenset()
) -> Iterator[tuple[int, T]]:
    for fd, name in _descriptors():
        if name in known:
            continue
        with contextlib.suppress(OSError):  # not what is looked for, or just closed
            opened = socket.socket(fileno=fd)
            try:
                found = look(opened)
            finally:
                opened.detach()  # it is somebody else's
            if found is not None:
                yield fd, found


def _descriptors() -> Iterator[tuple[int, str]]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # other threads close some meanwhile
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                yield int(fd), name


def _listener_on(port: int) -> Callable[[socket.socket], bool]:
    def is_one(opened: socket.socket) -> bool:
        return (
            opened.family in _SOURCE_ADDRESS
            and bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            and opened.getsockname()[1] == port
        )

    return is_one


def _accepted_on(port: int) -> Callable[[socket.socket], Source | None]:
    def source(opened: socket.socket) -> Source | None:
        if opened.family not in _SOURCE_ADDRESS or opened.getsockname()[1] != port:
            return None
        return _source(opened.getpeername())  # OSError: it listens

    return source


def _queue_of(listener: socket.socket) -> int:
    """Connections that have not been accepted."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACCEPT_QUEUE.stop)
    return int.from_bytes(info[_ACCEPT_QUEUE], "little")


# ---------------------------------------------------------------------- the filter

_Instruction = tuple[int, int, int, int]  # code, jump if so, jump if not, operand


def _filter_of(family: int, sources: Collection[Source]) -> list[_Instruction]:
    program = [
        (_LOAD_BYTE, 0, 0, _TCP_FLAGS),
        (_AND, 0, 0, _SYN | _ACK),
        (_IF_EQUAL, 0, 1, _SYN),
        (_RETURN, 0, 0, _PASS),
    ]
    for address, port in sources:
        source_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        packed = socket.inet_pton(source_family, address)
        if source_family == family:
            program += _passes(family, packed, port)
    return [*program, (_RETURN, 0, 0, _DROP)]


def _passes(family: int, address: bytes, port: int) -> list[_Instruction]:
    """Goes on behind these instructions unless the segment is from there."""
    words = struct.unpack(f"!{len(address) // 4}I", address)
    left = 2 * len(words) + 1  # instructions until behind
    program = [(_LOAD_HALF, 0, 0, 0), (_IF_EQUAL, 0, left, port)]
    for n, word in enumerate(words):
        left -= 2
        program.append((_LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE_ADDRESS[family] + 4 * n))
        program.append((_IF_EQUAL, 0, left, word))
    return [*program, (_RETURN, 0, 0, _PASS)]


def _attach(listener: socket.socket, program: list[_Instruction]) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code)
    sock_fprog = struct.pack("HL", len(program), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, sock_fprog)
