"""Keeps a dispatcher connected to the nodes that a directory tells of.

    a live record ─► link: connect ─► add_node ─► until the connection is lost ─► connect again …
    a later generation, or no live record and no connection ─► the link ends ─► remove_node

A record that is gone is no reason to part from a node that is still connected: the directory may
have lost its records, and the node registers again with its next heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from directory import Directory, NodeRecord
from protocol import DecodeNode, KvrelayError, NodeInfo, PrefillNode
from router import Dispatcher

logger = logging.getLogger(__name__)

POLL_S = 0.2  # a directory tells nothing by itself, and a new node should not idle for long
_FORGET_S = 30.0  # a node whose record is away for so long does not mean to come back
_CONNECT_TIMEOUT_S = 10.0
_MAX_DIALS = 16  # at a time
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0


class Connection(PrefillNode, DecodeNode, Protocol):
    """A node that we are connected to. Its streams end when the connection does."""

    async def close(self) -> None: ...


Connect = Callable[[NodeInfo], Awaitable[Connection]]


@dataclass
class _Link:
    """What keeps us connected to one generation of a node."""

    info: NodeInfo
    task: asyncio.Task[None]
    seen_at: float  # its record was there; of the event loop's clock


class Membership:
    """Follows a directory from `start` to `stop`. Belongs to one event loop."""

    def __init__(
        self,
        directory: Directory,
        dispatcher: Dispatcher,
        connect: Connect,
        *,
        fingerprint: str,
        poll_s: float = POLL_S,
        chance: random.Random | None = None,
    ) -> None:
        """`connect` raises KvrelayError, OSError or TimeoutError; it is tried again then."""
        self._directory = directory
        self._dispatcher = dispatcher
        self._connect = connect
        self._fingerprint = fingerprint
        self._poll_s = poll_s
        self._chance = chance or random.Random()
        self._dials = asyncio.Semaphore(_MAX_DIALS)
        self._links: dict[str, _Link] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._strangers: frozenset[NodeInfo] = frozenset()
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._polling = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        """Close all connections. Stop the dispatcher first, and nodes hear what has ended."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
        for node_id in list(self._links):
            self._leave(node_id)
        await asyncio.gather(*self._leaving.values())

    async def _poll(self) -> None:
        while True:
            self._follow(self._directory.nodes())
            await asyncio.sleep(self._poll_s)

    def _follow(self, records: tuple[NodeRecord, ...]) -> None:
        now = asyncio.get_running_loop().time()
        ours = {record.info.node_id: record for record in records if record.info.service}
        self._warn_of_strangers(ours.values())
        ours = {n: r for n, r in ours.items() if r.info.fingerprint == self._fingerprint}
        live = {node_id for node_id, record in ours.items() if record.alive}
        for node_id, link in list(self._links.items()):
            if node_id in ours:
                link.seen_at = now
            if self._is_over(link, ours.get(node_id), now):
                self._leave(node_id)
        for node_id in live - self._links.keys() - self._leaving.keys():
            info = ours[node_id].info
            self._links[node_id] = _Link(info, asyncio.create_task(self._keep(info)), now)

    def _is_over(self, link: _Link, record: NodeRecord | None, now: float) -> bool:
        if record is not None and record.info != link.info:
            return True
        if link.info.node_id in self._dispatcher.node_ids:
            return now - link.seen_at > _FORGET_S
        return record is None or not record.alive

    def _warn_of_strangers(self, records: Iterable[NodeRecord]) -> None:
        """Once of each."""
        infos = (record.info for record in records)
        strangers = frozenset(info for info in infos if info.fingerprint != self._fingerprint)
        for info in strangers - self._strangers:
            logger.warning(
                "node %s is left out: it serves another model (%s, fingerprint %s)",
                info.node_id,
                info.model,
                info.fingerprint,
            )
        self._strangers = strangers

    def _leave(self, node_id: str) -> None:
        self._leaving[node_id] = asyncio.create_task(self._part(self._links.pop(node_id)))

    async def _part(self, link: _Link) -> None:
        node_id = link.info.node_id
        link.task.cancel()
        await asyncio.wait([link.task])
        await self._dispatcher.remove_node(node_id)
        del self._leaving[node_id]

    # ------------------------------------------------------------------ one node

    async def _keep(self, info: NodeInfo) -> None:
        """Stay connected until cancelled."""
        num_failures = 0
        while True:
            try:
                await self._stay_connected(info)
                logger.warning("the connection to node %s is lost", info.node_id)
                num_failures = 0
            except (KvrelayError, OSError, TimeoutError) as error:
                level = logging.DEBUG if num_failures else logging.WARNING
                logger.log(level, "node %s cannot be reached: %s", info.node_id, error)
                num_failures += 1
            await asyncio.sleep(self._backoff_s(num_failures))

    async def _stay_connected(self, info: NodeInfo) -> None:
        """Returns when the connection is lost; raises if there never was one."""
        async with self._dials, asyncio.timeout(_CONNECT_TIMEOUT_S):
            node = await self._connect(info)
        try:
            self._dispatcher.add_node(node)
            logger.info("connected to node %s (%s)", info.node_id, info.role)
            await self._dispatcher.wait_lost(node)
        finally:
            await node.close()

    def _backoff_s(self, num_failures: int) -> float:
        """Different for each gateway: a node that comes back is not dialled by all at once."""
        backoff_s = min(_BACKOFF_S * 2.0**num_failures, _MAX_BACKOFF_S)
        return backoff_s * (0.5 + 0.5 * self._chance.random())
