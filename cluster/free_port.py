"""A port that nobody listens on, for a program that has to be told one."""

from __future__ import annotations

import socket

from protocol import ConfigError


def free_port(host: str) -> int:
    """Another program may take it before whoever is told; that one then says so.

    Raises:
        ConfigError: the host is not one of ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError("host", f"cannot listen on {host}: {error.strerror}") from error
        return int(probe.getsockname()[1])
