"""The directory of a cluster, where it is a server."""

from __future__ import annotations

from pathlib import Path

from cluster.directory_config import DirectoryAddress, DirectoryConfig
from directory import RedisConfig, RedisDirectory
from directory.redis_config import parse_url
from protocol import ConfigError


def start_directory(
    config: DirectoryConfig,
    name: str,
    address: DirectoryAddress,
    *,
    follow: bool = True,
    need_server: bool = False,
) -> RedisDirectory:
    """That of the cluster `name`. `follow` False: for one who only tells, such as a node.

    Without `need_server` it may be away: the cluster serves on.

    Raises:
        ConfigError: it is needed and not there, or does not let us in; or a setting is wrong.
    """
    try:
        directory = RedisDirectory(
            RedisConfig(
                url=address.url,
                key_prefix=config.prefix(name),
                password=None if address.password is None else address.password.value,
                tls_ca=_text(config.tls_ca),
                tls_cert=_text(config.tls_cert),
                tls_key=_text(config.tls_key),
                follow=follow,
            )
        )
        directory.start(need_server=need_server)
    except ConfigError as error:
        raise ConfigError(f"directory.{error.field}", error.problem) from error
    return directory


def hidden(url: str) -> str:
    """For people and logs: no secret is in it."""
    return str(parse_url(url))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
