"""The directory on a server does what every directory does."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from directory import Directory, RedisDirectory
from tests.directory.conformance import DirectoryConformance
from tests.directory.servers import KINDS, Server, new_prefix

SETTLE_S = 5.0


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.stop()


class RedisHarness:
    """The node and the router are two clients. Time passes by waiting for it."""

    ttl_s = 0.8

    def __init__(self, node_side: RedisDirectory, router_side: RedisDirectory) -> None:
        self._node_side = node_side
        self._router_side = router_side
        self.node_side: Directory = node_side
        self.router_side: Directory = router_side

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)
        self.settle()

    def settle(self) -> None:
        assert self._node_side.sync(SETTLE_S)
        assert self._router_side.sync(SETTLE_S)


class TestRedisDirectory(DirectoryConformance):
    @pytest.fixture
    def harness(self, server: Server) -> Iterator[RedisHarness]:
        prefix = new_prefix()
        with (
            server.directory(prefix, follow=False) as node_side,
            server.directory(prefix) as router_side,
        ):
            yield RedisHarness(node_side, router_side)
