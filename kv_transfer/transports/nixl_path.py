"""Writes from here to one peer, by NIXL. What is here belongs to the transport's thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_transfer.extents import Extents
from kv_transfer.transport import PeerRefused, PeerUnreachable, WriteState
from kv_transfer.transports.nixl_agent import (
    NixlAgent,
    NixlTransfer,
    RemotePool,
    TransferState,
    check_version,
)
from kv_transfer.transports.nixl_frames import Broken, Frame, Knock, Offer, Want, Writing
from kv_transfer.transports.port_lock import Source, sources_to
from protocol import ConfigError, HandoffTicket

logger = logging.getLogger(__name__)

# NIXL may copy it all in one call. In between, the thread hears what other peers have to say.
_PART_BYTES = 64 << 20
_LOOK_S = 20e-3  # between two looks for connections of ours, as UCX says nothing of new ones


class NixlWrite:
    """Extents that are to be written, or have been."""

    def __init__(self, peer: str, ticket: HandoffTicket, extents: Extents) -> None:
        self.peer = peer
        self.ticket = ticket
        self.extents = extents
        self.state = WriteState.PENDING


@dataclass
class _Remote:
    """The peer's pool behind one agent that it has offered, and our agent that writes there."""

    number: int
    agent: NixlAgent
    pool: RemotePool
    port: int  # to which UCX connects, where the peer lets in whom we name; 0: not at all
    sources: frozenset[Source] = frozenset()  # that the peer knows
    look_at: float = 0.0  # when to look for others
    announced: bool = False  # the peer knows that we write
    needs_help: bool = True  # of the peer's progress: NIXL does not copy by itself


@dataclass
class _Running:
    write: NixlWrite
    parts: deque[NDArray[np.int64]]  # that have not been started
    transfer: NixlTransfer | None = None


class NixlPath:
    """
    nothing ──Want──► asked ──Offer──► open ──Broken, or the peer is lost──► nothing …

    Writes wait for the offer. Those that run when the path breaks have failed, and our agent is
    closed at once: a peer that has lost its power never says how they ended, and UCX would go on
    reading blocks that belong to somebody else by then. So each path has an agent of its own.
    """

    def __init__(
        self,
        peer: str,
        open_agent: Callable[[], NixlAgent],
        send: Callable[[Frame], None],
        on_end: Callable[[], None],
    ) -> None:
        """`open_agent` may raise ConfigError: this host has no room for another one."""
        self.peer = peer
        self._open_agent = open_agent
        self._send = send
        self._on_end = on_end
        self._asked = False
        self._seen = 0  # number of the last offer
        self._agent: NixlAgent | None = None  # for the next offer
        self._remote: _Remote | None = None
        self._waiting: deque[NixlWrite] = deque()
        self._running: list[_Running] = []
        self._void: frozenset[HandoffTicket] = frozenset()  # nothing may be written under these
        self._lost = False

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to do."""
        return self._remote is not None and bool(self._running or self._waiting)

    @property
    def over(self) -> bool:
        """Whether another path to this peer could as well begin where this one is."""
        return self._lost and not self._waiting

    # ------------------------------------------------------------------ what happens

    def submit(self, write: NixlWrite) -> None:
        self._lost = False
        self._waiting.append(write)
        if self._remote is None and not self._asked:
            self._ask()

    def _ask(self) -> None:
        try:
            self._send(Want(self._seen))
            self._prepare()  # while the peer does the same
        except (PeerUnreachable, ConfigError) as error:
            self.give_up(str(error))
        else:
            self._asked = True

    def _prepare(self) -> NixlAgent:
        if self._agent is None:
            self._agent = self._open_agent()
        return self._agent

    def take_offer(self, offer: Offer) -> None:
        """The peer has no other agent for us any more."""
        self._seen = offer.number
        self._asked = False
        self._leave()
        try:
            self._remote = self._remote_of(offer)
        except (PeerRefused, ConfigError) as error:
            self.give_up(str(error))
            return
        self._void = frozenset(offer.void)
        self._knock(self._remote)

    def _remote_of(self, offer: Offer) -> _Remote:
        check_version(self.peer, offer.nixl_version)
        if not offer.whole:
            raise PeerRefused(f"{self.peer} sent damaged metadata of its agent")
        pool = RemotePool.on(offer.device, offer.agent, offer.address, offer.num_bytes)
        agent = self._prepare()
        agent.add(offer.agent, offer.metadata)
        self._agent = None
        return _Remote(offer.number, agent, pool, offer.port)

    def _knock(self, remote: _Remote) -> None:
        """Tell the peer from where UCX has connected to it. Often it is too early to see that."""
        now = time.monotonic()
        if not remote.port or now < remote.look_at:
            return
        remote.look_at = now + _LOOK_S
        sources = sources_to(remote.port)
        if sources <= remote.sources:
            return
        try:
            self._send(Knock(remote.number, tuple(sources)))
        except PeerUnreachable as error:
            logger.debug("%s", error)
        else:
            remote.sources = sources

    def give_up(self, problem: str) -> None:
        """What has not begun, has failed."""
        self._asked = False
        if self._waiting:
            logger.warning("nothing can be written to %s: %s", self.peer, problem)
        while self._waiting:
            self._settle(self._waiting.popleft(), WriteState.FAILED)

    def lose(self, problem: str) -> None:
        """The peer is gone. If it comes back, it makes another offer."""
        self._lost = True
        self.close(problem)

    def close(self, problem: str) -> None:
        """Whatever waits or runs has failed."""
        self.give_up(problem)
        self._leave()
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _leave(self) -> None:
        """Nothing is read from our pool for this peer any more, or will be in its."""
        remote, self._remote = self._remote, None
        if remote is None:
            return
        failed, self._running = self._running, []
        for running in failed:
            if running.transfer is not None:
                running.transfer.release()
        remote.agent.close()
        for running in failed:
            self._settle(running.write, WriteState.FAILED)

    # ------------------------------------------------------------------ writing

    def turn(self) -> bool:
        """Begin what waits, and move on what runs. Whether that was of use."""
        moved = False
        while self._remote is not None and self._waiting:
            moved = True
            self._begin(self._waiting.popleft(), self._remote)
        for running in list(self._running):
            if self._remote is not None:  # else it has failed with another one
                moved |= self._advance(running, self._remote)
        return moved

    def _begin(self, write: NixlWrite, remote: _Remote) -> None:
        fits = write.extents.within(remote.agent.num_bytes, remote.pool.num_bytes)
        if write.ticket in self._void or not fits:
            self._settle(write, WriteState.FAILED)
            return
        pending = deque(parts(write.extents, _PART_BYTES))
        if not pending:
            self._settle(write, WriteState.DONE)
            return
        self._running.append(_Running(write, pending))
        if remote.needs_help:
            self._announce(remote, begun=True)

    def _advance(self, running: _Running, remote: _Remote) -> bool:
        """One step; whether something moved."""
        moved = True
        if running.transfer is None:
            running.transfer = remote.agent.start(remote.pool, running.parts.popleft())
            remote.needs_help = running.transfer.state is TransferState.RUNNING
        elif running.transfer.state is TransferState.RUNNING:
            moved = running.transfer.poll()
        match running.transfer.state:
            case TransferState.BROKEN:
                return self._break(remote, running.transfer.problem)
            case TransferState.RUNNING:
                self._announce(remote, begun=True)
                if not moved:
                    self._knock(remote)
                return moved
        running.transfer = None
        if not running.parts:
            self._end(running, remote)
        return True

    def _break(self, remote: _Remote, problem: str) -> bool:
        """All has failed, if the peer will know that before it hears anything else of us."""
        try:
            self._send(Broken(remote.number))
        except PeerUnreachable as error:
            logger.debug("%s", error)  # it reads nothing at the moment, or soon is lost
            return False
        logger.warning("a write to %s has failed: %s", self.peer, problem)
        self._leave()
        if self._waiting:
            self._ask()
        return True

    def _end(self, running: _Running, remote: _Remote) -> None:
        self._running.remove(running)
        if not self._running:
            self._announce(remote, begun=False)
        self._settle(running.write, WriteState.DONE)

    def _announce(self, remote: _Remote, *, begun: bool) -> None:
        """If it cannot be told, it is lost, or has so much unread that it has to be told later."""
        if remote.announced is begun:
            return
        try:
            self._send(Writing(remote.number, begun))
        except PeerUnreachable as error:
            logger.debug("%s", error)
        else:
            remote.announced = begun

    def _settle(self, write: NixlWrite, state: WriteState) -> None:
        write.state = state
        self._on_end()


def parts(extents: Extents, limit: int) -> list[NDArray[np.int64]]:
    """The same bytes, in groups of about `limit` bytes, and never twice that."""
    rows = _cut(extents.merged().rows, limit)
    group = (np.cumsum(rows[:, 2]) - 1) // limit
    return np.split(rows, np.flatnonzero(np.diff(group)) + 1) if len(rows) else []


def _cut(rows: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """No row longer than `limit` bytes."""
    pieces = -(-rows[:, 2] // limit)
    if (pieces <= 1).all():
        return rows[rows[:, 2] > 0]
    cut = np.repeat(rows, pieces, axis=0)
    within = np.arange(len(cut)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut[:, :2] += (within * limit)[:, None]
    cut[:, 2] = np.minimum(limit, cut[:, 2] - within * limit)
    return cut
