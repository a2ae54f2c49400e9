"""Where a Redis or Valkey server is, how to be let in, and how often to talk to it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from protocol import ConfigError

DEFAULT_PORT = 6379
_TLS_OF_SCHEME = {"redis": False, "valkey": False, "rediss": True, "valkeys": True, "unix": False}
_PREFIX = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True)
class ServerAddress:
    """What a URL says. `path` is that of a Unix socket, or else empty."""

    tls: bool
    host: str
    port: int
    path: str
    database: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """For people and logs: no secret is in it."""
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"


@dataclass(frozen=True)
class RedisConfig:
    """Raises ConfigError that names the field.

    url: redis:// or valkey://, or with TLS rediss:// or valkeys://, and then
        [user:password@]host[:port][/database]; or unix://[user:password@]/path[?db=database].
    key_prefix: clusters with different prefixes share a server and know nothing of each other.
    follow: False for one who only writes; `nodes` and `subscribe` are then not for it.
    """

    url: str = field(repr=False)  # it may hold a password
    key_prefix: str = "kvrelay"
    password: str | None = field(default=None, repr=False)  # instead of one in the URL
    tls_ca: str | None = None  # files; without one, the system's authorities
    tls_cert: str | None = None
    tls_key: str | None = None
    follow: bool = True
    event_interval_s: float = 0.05  # between exchanges with the server
    status_interval_s: float = 0.1
    io_timeout_s: float = 1.0  # the server is away if it takes longer to connect or to answer
    max_stream_entries: int = 8192  # on the server, about; a reader that lags behind has a gap
    max_unsent_batches: int = 1024  # of one node; if more wait for the server, they are a gap
    retention_s: float = 3600.0  # a node that was silent for so long is forgotten by the server

    def __post_init__(self) -> None:
        self._check_numbers()
        if not _PREFIX.fullmatch(self.key_prefix):
            allowed = "must have 1 to 128 letters, digits or any of . _ : / -"
            raise ConfigError("key_prefix", f"{allowed}, not {self.key_prefix!r}")
        address = parse_url(self.url)
        if self.password is not None and address.password is not None:
            raise ConfigError("password", "is given twice: the URL holds one, too")
        if self.password == "":
            raise ConfigError("password", "is empty; leave it out if there is none")
        self._check_tls(address)

    @property
    def address(self) -> ServerAddress:
        """Where to connect; a password of its own is in it, too."""
        found = parse_url(self.url)
        if self.password is None:
            return found
        return replace(found, password=self.password)

    def _check_numbers(self) -> None:
        for name in ("event_interval_s", "status_interval_s", "io_timeout_s", "retention_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be above 0, not {getattr(self, name)}")
        for name in ("max_stream_entries", "max_unsent_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")

    def _check_tls(self, address: ServerAddress) -> None:
        for name in ("tls_ca", "tls_cert", "tls_key"):
            if getattr(self, name) is not None and not address.tls:
                raise ConfigError(name, "is of use with a rediss:// or valkeys:// URL only")
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(name, f"there is no file {path}")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ConfigError(missing, "is missing: a certificate and its key go together")


def parse_url(url: str) -> ServerAddress:
    """Raises ConfigError for `url`, in words that repeat nothing of it that may be secret."""
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError:  # its own words may quote a password with a slash in it
        raise ConfigError(
            "url", "cannot be read; special characters in a password are written as %XX"
        ) from None
    if parts.scheme not in _TLS_OF_SCHEME:
        raise ConfigError("url", f"must begin with one of {', '.join(_TLS_OF_SCHEME)}, and ://")
    if parts.fragment or (parts.query and parts.scheme != "unix"):
        raise ConfigError("url", "can have nothing behind ? or #")
    return ServerAddress(
        tls=_TLS_OF_SCHEME[parts.scheme],
        host=_host(parts),
        port=port,
        path=_socket_path(parts),
        database=_database(parts),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )


def _host(parts: SplitResult) -> str:
    if parts.scheme == "unix":
        if parts.hostname:
            raise ConfigError("url", "of a Unix socket is unix:///path, with three slashes")
        return ""
    if not parts.hostname:
        raise ConfigError("url", "names no host")
    return parts.hostname


def _socket_path(parts: SplitResult) -> str:
    if parts.scheme != "unix":
        return ""
    if parts.path in ("", "/"):
        raise ConfigError("url", "names no socket: unix:///path")
    return unquote(parts.path)


def _database(parts: SplitResult) -> int:
    if parts.scheme == "unix":
        text = parts.query.removeprefix("db=")
    else:
        text = parts.path.removeprefix("/")
    if text and not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ConfigError("url", "ends in something else than the number of a database")
    return int(text or 0)
