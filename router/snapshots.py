"""Asks nodes for their cache snapshots, where the prefix index needs one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from protocol import KvrelayError
from router.background import Background
from router.prefix_index import PrefixIndex
from router.roster import Member, Roster

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0  # it is taken between two steps
_PAUSE_S = 1.0  # after a node gave none


class Snapshots:
    """One question at a time to each node."""

    def __init__(
        self,
        roster: Roster,
        index: PrefixIndex,
        background: Background,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster = roster
        self._index = index
        self._background = background
        self._clock = clock
        self._under_way: set[Member] = set()
        self._not_before: WeakKeyDictionary[Member, float] = WeakKeyDictionary()

    def ask(self) -> None:
        """Ask those that have to be asked."""
        now = self._clock()
        for node_id in self._index.needs_snapshot():
            member = self._roster.get(node_id)
            if member is None or member.lost.is_set() or member in self._under_way:
                continue
            if now >= self._not_before.get(member, now):
                self._under_way.add(member)
                self._background.spawn(self._take(member))

    async def _take(self, member: Member) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                snapshot = await member.node.snapshot()
        except (TimeoutError, KvrelayError) as error:
            logger.warning("no cache snapshot of %s: %r", member.node_id, error)
            self._not_before[member] = self._clock() + _PAUSE_S
        else:
            if self._roster.is_current(member):  # else it is of a cache that is gone
                self._index.apply_snapshot(snapshot)
        finally:
            self._under_way.discard(member)
