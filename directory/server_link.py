"""One connection to a Redis or Valkey server. The only file that knows the client library."""

from __future__ import annotations

import importlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from directory.redis_config import RedisConfig, ServerAddress
from protocol import ConfigError

Command = Sequence[str | bytes | int]


class LinkError(Exception):
    """The server cannot be reached or does not do what it should. The link is of no use now."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field  # of `RedisConfig`, to which the problem points
        self.problem = problem

    def as_config_error(self) -> ConfigError:
        return ConfigError(self.field, self.problem)


@cache
def load_client() -> Any:
    """The client library. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module("redis")
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise ConfigError(
            "url", "the client is not installed; pip install 'kvrelay[redis]'"
        ) from error


class ServerLink:
    """Sends commands and reads their answers. Belongs to one thread."""

    def __init__(self, config: RedisConfig) -> None:
        """Connects and logs in. Raises LinkError, and ConfigError without the library."""
        self._client = load_client()
        self._connection = _connection(self._client, config)
        try:
            self._connection.connect()
        except (OSError, UnicodeError, self._client.RedisError) as error:  # a name no host can have
            self.close()
            raise _explained(error, self._client, config) from error
        self._config = config
        self.exchange([("PING",)])  # a short command is refused in clearer words than a long one

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """All answers, in order, after one round trip. Raises LinkError if one is an error."""
        try:
            packed = self._connection.pack_commands(commands)
            self._connection.send_packed_command(packed, check_health=False)
            return [self._connection.read_response() for _ in commands]
        except (OSError, self._client.RedisError) as error:
            self.close()
            raise _explained(error, self._client, self._config) from error

    def close(self) -> None:
        """Harmless when repeated."""
        self._connection.disconnect()


def _connection(client: Any, config: RedisConfig) -> Any:
    address = config.address
    settings: dict[str, Any] = {
        "db": address.database,
        "username": address.username,
        "password": address.password,
        "socket_timeout": config.io_timeout_s,
        "socket_connect_timeout": config.io_timeout_s,
        "protocol": 2,
        # Who retries, and when, is decided above.
        "retry": importlib.import_module("redis.retry").Retry(_no_backoff(), 0),
    }
    if address.path:
        del settings["socket_connect_timeout"]
        return client.UnixDomainSocketConnection(path=address.path, **settings)
    settings |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    if not address.tls:
        return client.Connection(**settings)
    return client.SSLConnection(
        ssl_ca_certs=config.tls_ca,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        ssl_cert_reqs="required",
        ssl_check_hostname=True,
        **settings,
    )


def _no_backoff() -> Any:
    return importlib.import_module("redis.backoff").NoBackoff()


def _explained(error: Exception, client: Any, config: RedisConfig) -> LinkError:
    """What went wrong, in words for who wrote the configuration."""
    address = config.address
    text = str(error)
    for cause in _chain(error):
        if isinstance(cause, ssl.SSLError):
            return _tls_problem(cause, address, config)
        problem = _no_connection(cause, client, address, config)
        if problem is not None:
            return LinkError("url", problem)
    for sign, field, words in _REFUSALS:
        if sign.lower() in text.lower():
            return LinkError(field, words.format(address=address, text=text))
    if isinstance(error, client.exceptions.InvalidResponse):
        return LinkError("url", f"what answers at {address} is no Redis or Valkey server")
    return LinkError("url", f"{address}: {text}")


# What the server or the client library says, the field that it is about, and what we say.
_REFUSALS = (
    ("without any password configured", "password", "{address} has none, but one was given"),
    ("WRONGPASS", "password", "{address} refuses it"),
    ("invalid username-password", "password", "{address} refuses it"),
    ("invalid password", "password", "{address} refuses it"),
    ("NOAUTH", "password", "{address} asks for one"),
    ("Authentication required", "password", "{address} asks for one"),
    ("NOPERM", "url", "the user may not do all that is needed at {address}: {text}"),
    ("no permissions", "url", "the user may not do all that is needed at {address}: {text}"),
    ("unknown command", "url", "what answers at {address} is no Redis or Valkey server"),
    ("closed by server", "url", "{address} closed the connection"),
)


def _no_connection(
    cause: Exception, client: Any, address: ServerAddress, config: RedisConfig
) -> str | None:
    if isinstance(cause, ConnectionRefusedError | FileNotFoundError):
        return f"nothing listens at {address}"
    if isinstance(cause, socket.gaierror | UnicodeError):
        return f"the host name {address.host!r} is not known"
    if isinstance(cause, PermissionError):
        return f"no permission to connect to {address}"
    if isinstance(cause, ConnectionResetError | BrokenPipeError):
        return f"{address} closed the connection"
    if isinstance(cause, TimeoutError | client.TimeoutError):
        hint = "; does it speak TLS?" if address.tls else ""
        return f"{address} does not answer within {config.io_timeout_s:g} s{hint}"
    return None


def _tls_problem(error: ssl.SSLError, address: ServerAddress, config: RedisConfig) -> LinkError:
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        field = "tls_ca" if config.tls_ca else "url"
        return LinkError(field, f"the certificate of {address} is refused: {error.verify_message}")
    if reason == "WRONG_VERSION_NUMBER":
        return LinkError("url", f"{address} speaks no TLS")
    return LinkError("url", f"no TLS with {address}: {reason}")


def _chain(error: Exception) -> Iterator[Exception]:
    """The error and what it came from."""
    found: BaseException | None = error
    while isinstance(found, Exception):
        yield found
        found = found.__cause__ or found.__context__
