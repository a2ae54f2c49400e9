"""Where a node listens for callers: on its own host, and on its network.

service   unix:host id/name+tcp:address:port/name      the near one first

What goes over TCP is authenticated, but not encrypted: such a network has to be a private one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket

from kv_transfer import PeerUnreachable
from kv_transfer.peering import Medium, TcpMedium, UnixMedium
from kv_transfer.peering.medium import cannot_reach
from protocol import ConfigError

_UNIX, _TCP, _SEPARATOR = "unix", "tcp", "+"
_MAX_NAME_CHARS = 40


def media_to_listen(bind: str, port: int, advertise: str | None) -> list[Medium]:
    """Raises ConfigError about `bind` or `advertise`."""
    try:
        return [UnixMedium(_UNIX), TcpMedium(_TCP, bind, port, advertise)]
    except ConfigError as error:
        raise about_bind(error) from error


def about_bind(error: ConfigError) -> ConfigError:
    return ConfigError("bind", error.problem) if error.field == "host" else error


def unique_name(node_id: str) -> str:
    """Of a listening socket; no other has had it."""
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", node_id)[:_MAX_NAME_CHARS]
    return f"{readable}-{secrets.token_hex(8)}"


def joined(endpoints: list[str]) -> str:
    return _SEPARATOR.join(endpoints)


class Dialler:
    """Connects to the endpoints that a node has told of."""

    def __init__(self) -> None:
        self._media: dict[str, Medium] = {_UNIX: UnixMedium(_UNIX), _TCP: TcpMedium(_TCP)}

    def split(self, service: str) -> list[str]:
        """The endpoints that may lead there from here.

        Raises PeerUnreachable: there are none.
        """
        reasons, endpoints = [], []
        for endpoint in service.split(_SEPARATOR):
            try:
                self._medium_of(endpoint).check(endpoint)
                endpoints.append(endpoint)
            except PeerUnreachable as error:
                reasons.append(str(error))
        if not endpoints:
            raise PeerUnreachable("; ".join(reasons))
        return endpoints

    async def connect(self, endpoint: str) -> socket.socket:
        """Raises PeerUnreachable: nobody listens there. PeerRefused: it is of another user."""
        medium = self._medium_of(endpoint)
        connection = medium.dial(endpoint)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(connection.close)
            try:
                await _connected(connection)
                medium.admit(connection)
            except OSError as error:
                raise cannot_reach(endpoint, error) from error
            on_failure.pop_all()
        return connection

    def _medium_of(self, endpoint: str) -> Medium:
        scheme = endpoint.partition(":")[0]
        if scheme not in self._media:
            raise PeerUnreachable(f"{endpoint!r} is not an endpoint of a node")
        return self._media[scheme]


async def _connected(connection: socket.socket) -> None:
    """Raises OSError: it cannot be."""
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(connection, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(connection)
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
