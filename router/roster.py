"""The nodes that jobs can be sent to, while they come and go.

    add ──► listened to ── its stream ends ──► lost ── add: the same id again ──► another member
                 └────────────── add of the same id, or remove ──────────────────► gone

A node is one member, until its stream ends or another takes its place. What a member that is not
the current one of its id still says is never heard: nobody listens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from protocol import (
    DecodeJob,
    DecodeNode,
    Delta,
    KvrelayError,
    NodeInfo,
    PrefillJob,
    PrefillNode,
    Role,
)
from router.background import Background
from router.view import Contact

logger = logging.getLogger(__name__)

AnyNode = PrefillNode | DecodeNode


class Member:
    """A node as it was when it came: a later generation of it is another member."""

    def __init__(self, node: AnyNode, caller: str, now: float) -> None:
        self.node = node
        self.info: NodeInfo = node.info
        self.caller = caller  # names its stream, which no other member shares
        self.heard_at = now
        self.lost = asyncio.Event()  # nothing that it does would be heard
        self.silent = False  # for too long: it is not to be waited for
        self.listening: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Member({self.info.node_id}, generation {self.info.generation})"

    @property
    def node_id(self) -> str:
        return self.info.node_id

    @property
    def role(self) -> Role:
        return self.info.role

    async def send(self, job: PrefillJob | DecodeJob) -> None:
        """Raises what `PrefillNode.prefill` and `DecodeNode.decode` do."""
        if isinstance(job, PrefillJob):
            await cast(PrefillNode, self.node).prefill(job)
        else:
            await cast(DecodeNode, self.node).decode(job)


class Roster:
    """Members by node id; listens to each. Belongs to one event loop."""

    def __init__(
        self,
        caller: str,
        on_delta: Callable[[Member, Delta], None],
        on_lost: Callable[[Member, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_lost` gets a member that is heard no more, once, and why."""
        self._caller = caller
        self._on_delta = on_delta
        self._on_lost = on_lost
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._listeners = Background()
        self._num_added = 0
        self._started = False

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def get(self, node_id: str) -> Member | None:
        return self._members.get(node_id)

    def member_of(self, node: AnyNode) -> Member | None:
        return next((member for member in self if member.node is node), None)

    def is_current(self, member: Member) -> bool:
        return self._members.get(member.node_id) is member

    @property
    def connected(self) -> frozenset[str]:
        return frozenset(member.node_id for member in self if not member.lost.is_set())

    def contacts(self) -> Mapping[str, Contact]:
        """What is known of each node by its connection, if there is one."""
        now = self._clock()
        return {
            member.node_id: Contact(member.info, now - member.heard_at)
            for member in self
            if not member.lost.is_set()
        }

    def start(self) -> None:
        self._started = True
        for member in self:
            self._listen_to(member)

    async def stop(self) -> None:
        self._started = False
        await self._listeners.stop()

    def add(self, node: AnyNode) -> Member:
        """Take the node in, in the place of whatever had its id."""
        caller = f"{self._caller}-{self._num_added}"
        self._num_added += 1
        member = Member(node, caller, self._clock())
        old = self._members.get(member.node_id)
        self._members[member.node_id] = member
        if self._started:
            self._listen_to(member)  # at first: no job may come before its stream
        if old is not None:
            self._dismiss(old, "was replaced")
        return member

    async def remove(self, node_id: str) -> None:
        """Forget the node. Harmless if it is unknown. Returns when nobody listens any more."""
        member = self._members.pop(node_id, None)
        if member is None:
            return
        self._dismiss(member, "was removed")
        if member.listening is not None:
            await asyncio.wait([member.listening])

    def _dismiss(self, member: Member, why: str) -> None:
        if member.listening is not None:
            member.listening.cancel()
        self._lose(member, why)

    def _lose(self, member: Member, why: str) -> None:
        if not member.lost.is_set():
            member.lost.set()
            self._on_lost(member, f"node {member.node_id} {why}")

    def _listen_to(self, member: Member) -> None:
        member.listening = self._listeners.spawn(self._listen(member))

    async def _listen(self, member: Member) -> None:
        why = "stopped"
        try:
            async for batch in member.node.outputs(member.caller):
                member.heard_at = self._clock()
                for delta in batch.deltas:
                    self._on_delta(member, delta)
        except KvrelayError as error:
            why = f"stopped: {error}"
        logger.warning("node %s is lost", member.node_id)
        self._lose(member, why)
