"""Between processes and hosts, by NIXL over UCX; messages over authenticated TCP beside it.

All calls of NIXL come from one thread, which sleeps as long as nobody writes. A node has two agents
for each peer: a fence has to close the door on one peer, and what is written to one that is lost
has to end, and closing an agent is the only way to either that holds:

    P's process                    kernels               D's process
    pool ──► agent to D  ═══ blocks on their way ═══►  agent for P ──► pool
    pool ──► agent to E                                agent for Q ──► pool

UCX asks nobody for a token, so the kernel lets nobody but P connect to the agent for P, and to
those with which a node writes, nobody at all.

Once the agent for P is closed, nothing that is still on its way can reach the pool. What remains
is a process of the same host that copies by itself (UCX does so where it may): that ends with it.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kv_transfer.envelope import BadMessage
from kv_transfer.extents import Extents
from kv_transfer.layout import BlockPoolMemory, PeerPool
from kv_transfer.peering import (
    ClusterToken,
    Passport,
    PeeringConfig,
    PeerNetwork,
    ProcessIdentity,
    TcpMedium,
)
from kv_transfer.transport import PeerLost, PeerRefused, PeerUnreachable, Received, WriteState
from kv_transfer.transports.nixl_agent import (
    AgentBroken,
    NixlAgent,
    NixlConfig,
    check_version,
    load_nixl,
)
from kv_transfer.transports.nixl_frames import (
    Broken,
    Frame,
    Hello,
    Knock,
    NoOffer,
    Offer,
    Want,
    Writing,
    decode_hello,
    digest_of,
    encode_hello,
    of_node,
    of_transport,
    parse,
)
from kv_transfer.transports.nixl_path import NixlPath, NixlWrite
from protocol import ConfigError, HandoffTicket

logger = logging.getLogger(__name__)

MAX_INBOX_BYTES = 64 << 20  # of messages that the node has not taken; then peers have to wait
_MAX_VOID = 4096  # tickets of one peer that was lost, and may come back
_MAX_CLOSED = 8192  # tickets that are remembered although they are closed
_EAGER_S = 200e-6  # so long after the last byte the next one is expected at any moment
_REST_SHARE = 1 / 8  # of the time since then, between two looks at NIXL; so late an end may be seen
_LONGEST_REST_S = 5e-3  # as a peer that has stopped may have bytes on their way for ever

# Of pools that were closed while a process of this host might copy into them by itself.
_kept: list[Any] = []


@dataclass
class _Door:
    """The agent through which one peer writes to us."""

    number: int
    agent: NixlAgent
    writing: bool = False  # the agent has to make progress


class NixlTransport:
    """One node's end.

    Raises:
        ConfigError: NIXL is not installed; or cannot listen at that address.
    """

    def __init__(
        self,
        name: str,
        token: ClusterToken,
        config: NixlConfig | None = None,
        *,
        peering: PeeringConfig | None = None,
    ) -> None:
        load_nixl()
        self.config = config or NixlConfig()
        medium = TcpMedium("nixl", self.config.bind)
        self._network = PeerNetwork(name, medium, token, peering or PeeringConfig())
        self._medium = medium
        self.endpoint = self._network.endpoint
        self._process = ProcessIdentity.own()
        self._lock = threading.Lock()
        self._inbox: list[Received] = []
        self._inbox_bytes = 0
        self._lost: list[PeerLost] = []
        self._tickets: dict[HandoffTicket, str] = {}  # open; the peer that may write
        self._closed_tickets: dict[HandoffTicket, str] = {}  # longest not asked for first
        self._forgotten = False  # not all tickets are remembered any more
        self._doors: dict[str, _Door] = {}  # changed by the thread only, under the lock
        self._void: dict[str, set[HandoffTicket]] = {}  # that a peer's next agent must not serve
        self._jobs: deque[Callable[[], None]] = deque()  # for the thread; as many as writes
        self._paths: dict[str, NixlPath] = {}
        self._num_doors = 0
        self._num_writers = 0
        self._awake = threading.Event()
        self._news = False  # the node has something to look at
        self._closing = False
        self._withdrawn = False  # nothing is written any more
        self._spare: NixlAgent | None = None  # for the first peer that is written to
        self._thread = threading.Thread(target=self._run, name=f"nixl-{name}", daemon=True)

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        """As Transport. Raises ConfigError: UCX finds no device, or cannot take this memory."""
        self.config.check_reaches(pool.device)
        _enter_thread(pool)
        self._pool = pool
        self._on_activity = on_activity
        self._spare = self._open_writer()  # sooner than needed, so that what is wrong is said now
        hello = Hello(nixl_version=load_nixl().version, device=pool.device)
        self._network.start(pool.shape, self._on_network, extra=encode_hello(hello))
        self._thread.start()
        atexit.register(self.close)  # NIXL must not be at work when the interpreter goes

    def resolve(self, endpoint: str) -> str:
        self._medium.check(endpoint)
        return endpoint

    def connect(self, peer: str) -> None:
        self._network.connect(peer)

    def peer_pool(self, peer: str) -> PeerPool | None:
        passport = self._network.passport(peer)
        if passport is None:
            return None
        try:
            hello = decode_hello(self._network.extra(peer))
        except BadMessage as error:
            raise PeerRefused(f"{peer}: {error}") from error
        check_version(peer, hello.nixl_version)
        return passport.pool

    def open(self, ticket: HandoffTicket, peer: str, block_ids: Sequence[int]) -> None:
        """NIXL lets the peer write anywhere in the pool; that it does not is its own promise."""
        with self._lock:
            self._closed_tickets.pop(ticket, None)
            self._void.get(peer, set()).discard(ticket)
            self._tickets[ticket] = peer
        self._do(partial(self._open_door, peer))

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> NixlWrite:
        write = NixlWrite(peer, ticket, extents)
        with self._lock:
            if self._closing or self._withdrawn:
                write.state = WriteState.FAILED
            else:
                self._do(partial(self._submit, write))
        return write

    def notify(self, peer: str, message: bytes) -> None:
        self._network.send(peer, of_node(message))

    def receive(self) -> Sequence[Received]:
        with self._lock:
            taken, self._inbox = self._inbox, []
            was_full = self._inbox_bytes >= MAX_INBOX_BYTES
            self._inbox_bytes = 0
        if was_full:
            self._awake.set()
        return taken

    def lost_peers(self) -> Sequence[PeerLost]:
        with self._lock:
            if self._inbox:  # of which some may come from them
                return ()
            lost, self._lost = self._lost, []
            return lost

    # ------------------------------------------------------------------ fences

    def fence(self, ticket: HandoffTicket) -> bool:
        """As Transport. Proof is that the peer's agent here is closed, and that the peer

        * has exited, as the system says; or
        * has never been here, so that it does not know where to write; or
        * is on another host, so that it reaches the pool by that agent only. Should it come back,
          it is told under which tickets it must not write any more.
        """
        with self._lock:
            peer = self._close_ticket(ticket)
            if peer is None:
                return not self._forgotten
            exited = self._network.has_exited(peer)
            if peer not in self._doors and (exited or self._make_void(ticket, peer)):
                del self._closed_tickets[ticket]
                return True
        if exited:
            self._do(partial(self._close_door, peer))
        return False

    def _make_void(self, ticket: HandoffTicket, peer: str) -> bool:
        """Whether a peer that we hold no door open for will not write under this ticket."""
        if self._network.is_stranger(peer):
            return True
        if not self._is_shut_out(peer):
            return False
        void = self._void.setdefault(peer, set())
        if len(void) >= _MAX_VOID:
            return False
        void.add(ticket)
        return True

    def _close_ticket(self, ticket: HandoffTicket) -> str | None:
        """The peer that may have written under it. The last ones asked for are remembered."""
        peer = self._tickets.pop(ticket, None) or self._closed_tickets.pop(ticket, None)
        if peer is None:
            return None
        self._closed_tickets[ticket] = peer
        if len(self._closed_tickets) > _MAX_CLOSED:
            del self._closed_tickets[next(iter(self._closed_tickets))]
            self._forgotten = True
        return peer

    def _is_shut_out(self, peer: str) -> bool:
        """Whether it can write through no door but that which we hold."""
        passport = self._network.met(peer)
        return passport is not None and needs_our_agent(self._process, passport, self._pool.device)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if self._thread.ident is not None:
            self._awake.set()
            self._thread.join()
        elif self._spare is not None:
            self._spare.close()
        self._network.close()

    def _withdraw(self) -> None:
        """The last that the thread does."""
        with self._lock:
            self._withdrawn = True
        while self._jobs:
            self._jobs.popleft()()
        for path in self._paths.values():
            path.close("this node closes")
        if self._spare is not None:
            self._spare.close()
        if any(self._copies_by_itself(peer) for peer in self._doors):
            _kept.append(self._pool.owner)
        for peer in list(self._doors):
            self._close_door(peer)
        self._on_activity()

    def _copies_by_itself(self, peer: str) -> bool:
        return not self._network.has_exited(peer) and not self._is_shut_out(peer)

    # ------------------------------------------------------------------ the thread

    def _do(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._awake.set()

    def _on_network(self) -> None:
        self._note_news()  # perhaps a process has exited, which no message says
        self._awake.set()

    def _run(self) -> None:
        _enter_thread(self._pool)
        try:
            self._work()
        finally:
            self._withdraw()

    def _work(self) -> None:
        moved_at = 0.0
        while not self._closing:
            self._awake.clear()
            moved = self._turn()
            now = time.monotonic()
            if moved:
                moved_at = now
            elif not self._busy:
                self._awake.wait()
            elif now < moved_at + _EAGER_S:
                time.sleep(0)  # for the threads of this process that have something to do
            else:
                self._awake.wait(min(_REST_SHARE * (now - moved_at), _LONGEST_REST_S))

    @property
    def _busy(self) -> bool:
        return any(path.busy for path in self._paths.values()) or any(
            door.writing for door in self._doors.values()
        )

    def _turn(self) -> bool:
        """Whatever can be done now; whether something was."""
        moved = bool(self._jobs)
        while self._jobs:
            self._jobs.popleft()()
        self._hear()
        for peer, path in list(self._paths.items()):
            moved |= path.busy and path.turn()
            if path.over:
                del self._paths[peer]
        for peer, door in list(self._doors.items()):
            moved |= door.writing and self._make_progress(peer, door)
        return self._tell() or moved

    def _tell(self) -> bool:
        """Call the node, if there is something for it; whether there was."""
        told = self._news
        if told:  # not in one go: other threads set it too
            self._news = False
            self._on_activity()
        return told

    def _note_news(self) -> None:
        self._news = True

    def _hear(self) -> None:
        """What peers say, in order; but who was lost is locked out before it is heard again."""
        with self._lock:
            if self._inbox_bytes >= MAX_INBOX_BYTES:
                return
        messages, lost = self._network.receive(), self._network.lost_peers()
        for loss in lost:
            self._close_door(loss.peer)
        for message in messages:
            self._take(message)
        for loss in lost:
            self._lose(loss)

    def _take(self, received: Received) -> None:
        try:
            said = parse(received.data)
        except BadMessage as error:
            logger.warning("from %s: %s", received.peer, error)
            return
        if isinstance(said, bytes):
            with self._lock:
                self._inbox.append(Received(received.peer, said))
                self._inbox_bytes += len(said) + 1
            self._note_news()
        else:
            self._take_frame(received.peer, said)

    def _take_frame(self, peer: str, frame: Frame) -> None:
        match frame:
            case Want():
                self._on_want(peer, frame)
            case Offer():
                self._path(peer).take_offer(frame)
            case NoOffer():
                self._path(peer).give_up(frame.problem)
            case Knock():
                self._let_in(peer, frame)
            case Writing():
                if door := self._door(peer, frame.number):
                    door.writing = frame.begun
                    if not frame.begun:
                        door.agent.close_behind()
            case Broken():
                if self._door(peer, frame.number):
                    self._close_door(peer)

    def _lose(self, loss: PeerLost) -> None:
        path = self._paths.get(loss.peer)
        if path is not None:
            path.lose(str(loss.error))
        with self._lock:
            self._lost.append(loss)
        self._note_news()

    # ------------------------------------------------------------------ writes of ours

    def _path(self, peer: str) -> NixlPath:
        path = self._paths.get(peer)
        if path is None:
            path = self._paths[peer] = NixlPath(
                peer, self._take_writer, partial(self._send, peer), self._note_news
            )
        return path

    def _take_writer(self) -> NixlAgent:
        spare, self._spare = self._spare, None
        return spare or self._open_writer()

    def _open_writer(self) -> NixlAgent:
        self._num_writers += 1
        return NixlAgent(f"{self.endpoint}>{self._num_writers}", self._pool, self.config)

    def _submit(self, write: NixlWrite) -> None:
        self._path(write.peer).submit(write)

    def _send(self, peer: str, frame: Frame) -> None:
        self._network.send(peer, of_transport(frame))

    # ------------------------------------------------------------------ writes of others

    def _door(self, peer: str, number: int) -> _Door | None:
        """Unless it is another one by now."""
        door = self._doors.get(peer)
        return door if door is not None and door.number == number else None

    def _on_want(self, peer: str, want: Want) -> None:
        door = self._doors.get(peer)
        if door is not None and door.number <= want.seen:
            self._close_door(peer)
        self._open_door(peer)  # unless it has been offered, and the offer is on its way

    def _open_door(self, peer: str) -> None:
        if peer in self._doors:
            return
        try:
            self._send(peer, self._make_door(peer))
        except ConfigError as error:
            logger.warning("%s cannot write to this node: %s", peer, error)
            self._refuse(peer, NoOffer(str(error)))
        except PeerUnreachable as error:
            logger.debug("%s", error)
            self._close_door(peer)

    def _refuse(self, peer: str, frame: NoOffer) -> None:
        try:
            self._send(peer, frame)
        except PeerUnreachable as error:
            logger.debug("%s", error)

    def _make_door(self, peer: str) -> Offer:
        self._num_doors += 1
        agent = NixlAgent(f"{self.endpoint}#{self._num_doors}", self._pool, self.config)
        with self._lock:
            self._doors[peer] = _Door(self._num_doors, agent)
            void = tuple(self._void.get(peer, ()))
        metadata = agent.metadata()
        return Offer(
            number=self._num_doors,
            nixl_version=load_nixl().version,
            agent=agent.name,
            metadata=metadata,
            digest=digest_of(metadata),
            device=self._pool.device,
            address=self._pool.address,
            num_bytes=self._pool.num_bytes,
            port=agent.port,
            void=void,
        )

    def _let_in(self, peer: str, knock: Knock) -> None:
        door = self._door(peer, knock.number)
        if door is None:
            return
        try:
            door.agent.admit(knock.sources)
        except OSError as error:
            logger.warning("%s cannot write to this node from %s: %s", peer, knock.sources, error)
            self._refuse(peer, NoOffer(str(error)))
            self._close_door(peer)  # which ends what it has begun

    def _close_door(self, peer: str) -> None:
        door = self._doors.get(peer)
        if door is None:
            return
        door.agent.close()
        with self._lock:
            del self._doors[peer]
        self._note_news()  # somebody may wait for a fence

    def _make_progress(self, peer: str, door: _Door) -> bool:
        try:
            return door.agent.progress()
        except AgentBroken as error:
            logger.warning("%s can write no more: %s", peer, error)
            self._close_door(peer)
            return True


def _enter_thread(pool: BlockPoolMemory) -> None:
    """UCX needs the device's context in each thread that calls it, and makes none."""
    if pool.copier is not None:
        pool.copier.enter_thread()


def needs_our_agent(own: ProcessIdentity, peer: Passport, device: str) -> bool:
    """Whether this peer can reach memory of this device by the agent made for it, and only so.

    One on this host may copy by itself, and between hosts so may GPUs that share a fabric.
    """
    return device == "cpu" and peer.process.boot_id != own.boot_id
