"""Where the directory of a cluster is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cluster.secret import Secret
from protocol import ConfigError


class DirectoryAddress(msgspec.Struct, frozen=True):
    """Where the directory of a cluster is reached."""

    url: str
    password: Secret | None = None  # if there is none in the url


@dataclass(frozen=True, kw_only=True)
class DirectoryConfig:
    """A Redis or Valkey server that is there, or an embedded one.

    Raises:
        ConfigError: two settings cannot go together.
    """

    url: str | None = field(default=None, repr=False)  # it may have a password in it
    key_prefix: str | None = None  # None: `kvrelay:` and the cluster's name
    tls_ca: Path | None = None  # who has signed the server's certificate; None: the system's
    tls_cert: Path | None = None  # ours, if the server asks for one
    tls_key: Path | None = None
    node_ttl_s: float = 15.0  # a node that is silent for longer is not well

    def __post_init__(self) -> None:
        if self.key_prefix == "":
            raise ConfigError("directory.key_prefix", "must not be empty")
        for name in ("tls_ca", "tls_cert", "tls_key"):
            if getattr(self, name) is not None and self.url is None:
                raise ConfigError(f"directory.{name}", "is for a server with a url")
        if not 0 < self.node_ttl_s < float("inf"):
            raise ConfigError("directory.node_ttl_s", f"must be above 0, not {self.node_ttl_s}")

    def prefix(self, name: str) -> str:
        """Of all keys of the cluster of this name."""
        return self.key_prefix or f"kvrelay:{name}"
