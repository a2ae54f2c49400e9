"""A cluster that others run, as one of its gateways sees it.

directory ─► Membership ─► Dispatcher ─► nodes, over connections of their own
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial

from cluster.connected_node import connect_node
from cluster.eventually import eventually
from cluster.membership import Membership
from directory import Directory
from kv_transfer.peering import ClusterToken
from router import Dispatcher, RouterConfig

logger = logging.getLogger(__name__)

_MEET_S = 10.0  # for nodes that the directory knows, before it is served without them


class JoinedCluster:
    """Needs the directory and the cluster's token; `start` and `stop` belong to one event loop."""

    def __init__(
        self,
        join: Callable[[], Directory],
        fingerprint: str,
        token: ClusterToken,
        routing: RouterConfig,
        *,
        expected: Iterable[str] | None = None,
        meet_s: float = _MEET_S,
    ) -> None:
        """`join` connects to the directory; it may take its time, and raises what is wrong.

        `expected`: nodes that it meets before it serves; None: those that the directory has.
        """
        self._join = join
        self._fingerprint = fingerprint
        self._token = token
        self._routing = routing
        self._expected = None if expected is None else frozenset(expected)
        self._meet_s = meet_s
        self._to_stop = contextlib.AsyncExitStack()
        self._dispatcher: Dispatcher | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "the cluster is not joined"
        return self._dispatcher

    async def start(self) -> None:
        """Returns when it may be served. Raises what `join` raises; then nothing is left."""
        async with contextlib.AsyncExitStack() as on_failure:
            directory = await asyncio.to_thread(self._join)
            on_failure.push_async_callback(asyncio.to_thread, directory.close)
            dispatcher = Dispatcher(directory, self._fingerprint, config=self._routing)
            membership = Membership(
                directory,
                dispatcher,
                partial(connect_node, token=self._token),
                fingerprint=self._fingerprint,
            )
            on_failure.push_async_callback(membership.stop)
            on_failure.push_async_callback(dispatcher.stop)  # first: it says goodbye to nodes
            await dispatcher.start()
            await membership.start()
            await self._meet(directory, dispatcher)
            self._dispatcher = dispatcher
            self._to_stop = on_failure.pop_all()

    async def stop(self) -> None:
        """Requests under way are aborted on their nodes; no connection or task is left."""
        await self._to_stop.aclose()

    async def _meet(self, directory: Directory, dispatcher: Dispatcher) -> None:
        if self._expected is None:
            expected = {record.info.node_id for record in directory.nodes() if record.alive}
        else:
            expected = set(self._expected)
        if not await eventually(lambda: expected <= dispatcher.node_ids, within_s=self._meet_s):
            missing = ", ".join(sorted(expected - dispatcher.node_ids))
            logger.warning("serves without %s, which could not be reached", missing)
