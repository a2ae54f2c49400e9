"""Where nodes listen, and how their endpoints are written: Unix sockets of a host, or TCP."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from typing import Protocol

from kv_transfer.peering.passport import ProcessIdentity
from kv_transfer.transport import PeerRefused, PeerUnreachable
from protocol import ConfigError

_BACKLOG = 128
_MAX_ENDPOINT_CHARS = 200
_NAME = r"[A-Za-z0-9_.-]{1,80}"
_UCRED = struct.Struct("3i")  # pid, uid, gid

# A host that has lost its power says nothing; without a word of it for so long it is lost.
_KEEPALIVE_S = 3
_KEEPALIVE_PROBES = 2
_USER_TIMEOUT_MS = 10_000


class Medium(Protocol):
    """One kind of socket. `name` in an endpoint is unique in all time."""

    passes_descriptors: bool

    def listen(self, name: str) -> tuple[socket.socket, str]:
        """A bound socket that listens and does not block, and its endpoint.

        Raises ConfigError if that address cannot be had.
        """

    def check(self, endpoint: str) -> None:
        """Raise PeerUnreachable if this is no endpoint that can be dialled from here."""

    def dial(self, endpoint: str) -> socket.socket:
        """A socket that does not block and is, or is about to be, connected.

        Raises PeerUnreachable: nobody listens there, or this is no endpoint of this medium.
        """

    def admit(self, connection: socket.socket) -> None:
        """Raise PeerRefused if the other end of this connection may not speak with us at all."""


class UnixMedium:
    """`scheme:host id/name`: sockets in the abstract namespace, which vanish with their process."""

    passes_descriptors = True

    def __init__(self, scheme: str) -> None:
        self._host_id = ProcessIdentity.own().host_id
        self._scheme = scheme
        self._pattern = re.compile(rf"{re.escape(scheme)}:([0-9a-f]+)/({_NAME})")

    def listen(self, name: str) -> tuple[socket.socket, str]:
        listener = _open_socket(socket.AF_UNIX)
        listener.bind(_abstract(name))
        listener.listen(_BACKLOG)
        return listener, f"{self._scheme}:{self._host_id}/{name}"

    def check(self, endpoint: str) -> None:
        self._name_in(endpoint)

    def dial(self, endpoint: str) -> socket.socket:
        name = self._name_in(endpoint)
        return _begin_to_connect(_open_socket(socket.AF_UNIX), _abstract(name), endpoint)

    def admit(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(credentials)
        if uid != os.geteuid():
            raise PeerRefused(f"the peer is a process of user {uid}, this node of {os.geteuid()}")

    def _name_in(self, endpoint: str) -> str:
        match = self._pattern.fullmatch(endpoint)
        if match is None:
            raise _not_an_endpoint(endpoint, self._scheme)
        host_id, name = match.groups()
        if host_id != self._host_id:
            raise PeerUnreachable(
                f"{endpoint} is on another host: its id is {host_id}, ours {self._host_id}"
            )
        return name


class TcpMedium:
    """`scheme:address:port/name`; loopback and any free port, unless told otherwise.

    `host` is a numeric address to bind to, and `advertise` the one that peers dial, if another.
    Raises ConfigError: no such address, or an address of all networks that nobody can dial.
    """

    passes_descriptors = False

    def __init__(
        self, scheme: str, host: str = "127.0.0.1", port: int = 0, advertise: str | None = None
    ) -> None:
        self._scheme = scheme
        self._host = _numeric("host", host)
        self._port = port
        self._advertise = _numeric("advertise", advertise or host)
        if self._advertise.is_unspecified:
            raise ConfigError("advertise", f"peers cannot dial {self._advertise}; name an address")
        self._pattern = re.compile(rf"{re.escape(scheme)}:(.+):([0-9]{{1,5}})/({_NAME})")

    def listen(self, name: str) -> tuple[socket.socket, str]:
        listener = _open_socket(_family_of(self._host))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((str(self._host), self._port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            address = f"{self._host}:{self._port}"
            raise ConfigError("host", f"cannot listen at {address}: {error.strerror}") from error
        port = listener.getsockname()[1]
        return listener, f"{self._scheme}:{self._advertise}:{port}/{name}"

    def check(self, endpoint: str) -> None:
        self._address_in(endpoint)

    def dial(self, endpoint: str) -> socket.socket:
        host, port = self._address_in(endpoint)
        connection = _open_socket(_family_of(host))
        _notice_dead_hosts(connection)
        return _begin_to_connect(connection, (str(host), port), endpoint)

    def admit(self, connection: socket.socket) -> None:
        """Anybody who knows the token."""
        _notice_dead_hosts(connection)

    def _address_in(self, endpoint: str) -> tuple[_Address, int]:
        match = self._pattern.fullmatch(endpoint)
        if match is None or len(endpoint) > _MAX_ENDPOINT_CHARS:
            raise _not_an_endpoint(endpoint, self._scheme)
        host, port, _ = match.groups()
        try:  # a name would have to be looked up, which can take long
            return ipaddress.ip_address(host), min(int(port), 65535)
        except ValueError as error:
            raise _not_an_endpoint(endpoint, self._scheme) from error


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _numeric(field: str, address: str) -> _Address:
    try:
        return ipaddress.ip_address(address)
    except ValueError as error:
        raise ConfigError(field, f"{address!r} is not a numeric address") from error


def _family_of(address: _Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _abstract(name: str) -> bytes:
    return b"\0kvrelay/" + name.encode()


def _open_socket(family: socket.AddressFamily) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    if family is not socket.AF_UNIX:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def _begin_to_connect(
    connection: socket.socket, address: bytes | tuple[str, int], endpoint: str
) -> socket.socket:
    try:
        connection.connect(address)
    except BlockingIOError as error:
        # TCP goes on by itself. A Unix socket whose listener's queue is full does not.
        if connection.family == socket.AF_UNIX:
            connection.close()
            raise PeerUnreachable(f"{endpoint} takes no more connections now") from error
    except OSError as error:
        connection.close()
        raise cannot_reach(endpoint, error) from error
    return connection


def cannot_reach(endpoint: str, error: OSError) -> PeerUnreachable:
    """In the words of the system."""
    return PeerUnreachable(f"there is no node at {endpoint}: {error.strerror}")


def _notice_dead_hosts(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def _not_an_endpoint(endpoint: str, scheme: str) -> PeerUnreachable:
    return PeerUnreachable(f"{endpoint[:_MAX_ENDPOINT_CHARS]!r} is not an endpoint of {scheme}")
