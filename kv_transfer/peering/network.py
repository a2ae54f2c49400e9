"""One node among its peers: who is there, what they say, and whether they are gone.

A node listens, and dials whom it wants to send to or learn about. A dialled connection carries
messages one way, from dialler to listener; who wants to answer dials back. The end of either of
the two is enough to call a peer lost; only the end of its process is proof that it does nothing
any more.

    connect ─► handshake ─► passport known, messages ─► lost_peers ─► (after a while) connect …
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.layout import PeerPool
from kv_transfer.peering import handshake
from kv_transfer.peering.cluster_token import ClusterToken
from kv_transfer.peering.config import PeeringConfig
from kv_transfer.peering.connection import Connection
from kv_transfer.peering.handshake import Identity, Met
from kv_transfer.peering.inbox import Inbox
from kv_transfer.peering.medium import Medium, cannot_reach
from kv_transfer.peering.passport import Passport, ProcessIdentity, digest_of
from kv_transfer.peering.peer import Peer
from kv_transfer.peering.poller import READ, WRITE, Poller
from kv_transfer.peering.process_watch import ProcessExited, watch
from kv_transfer.transport import PeerLost, PeerRefused, PeerUnreachable, Received

logger = logging.getLogger(__name__)

_MAX_ACCEPTS = 64  # in one go
_ACCEPT_PAUSE_S = 0.5  # when this process has no descriptors left
_JOIN_TIMEOUT_S = 30.0
_MAX_NAME_CHARS = 40
_DEFAULTS = PeeringConfig()


class PeerNetwork:
    """Callable from any thread. Nothing but `close` waits. `on_activity` comes from its thread."""

    def __init__(
        self, name: str, medium: Medium, token: ClusterToken, config: PeeringConfig = _DEFAULTS
    ) -> None:
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_MAX_NAME_CHARS]
        self.config = config
        self._medium = medium
        self._token = token
        # Peers may come from now on, but are not let in before `start`.
        self._listener, self.endpoint = medium.listen(f"{readable}-{secrets.token_hex(8)}")
        self._accept_at: float | None = None  # when paused
        self._lock = threading.Lock()
        self._poller = Poller()
        self._peers: dict[str, Peer] = {}
        self._handshaking: dict[Connection, None] = {}  # oldest first
        self._paused: set[Connection] = set()
        self._inbox = Inbox(config.max_inbox_messages, config.max_inbox_bytes)
        self._news = False  # on_activity is due
        self._closing_by: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"peers-{readable}", daemon=True)

    def start(
        self,
        pool: PeerPool,
        on_activity: Callable[[], None],
        *,
        extra: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        """Let peers in. `extra` goes to every peer, `descriptors` to those that dial us.

        Only Unix sockets pass descriptors, which stay the caller's, and open until `close`.
        """
        assert self._medium.passes_descriptors or not descriptors
        self._on_activity = on_activity
        self._descriptors = tuple(descriptors)
        passport = Passport(
            endpoint=self.endpoint,
            pool=pool,
            process=ProcessIdentity.own(),
            num_descriptors=len(descriptors),
            extra_bytes=len(extra),
            extra_digest=digest_of(extra),
        )
        self._me = Identity(self._token, passport, extra, self.config.max_extra_bytes)
        self._poller.watch(self._listener.fileno(), READ, self._on_listener)
        self._thread.start()

    # ------------------------------------------------------------------ for any thread

    def check(self, endpoint: str) -> None:
        """Raise PeerUnreachable if this is no endpoint that can be dialled from here."""
        self._medium.check(endpoint)

    def connect(self, peer: str) -> None:
        """Dial, unless that is done or under way, or failed less than `retry_after_s` ago."""
        with self._lock:
            self._dialled(peer)
            self._tell()

    def passport(self, peer: str) -> Passport | None:
        """Of a peer that we have dialled; None while the connection is being made.

        Raises PeerUnreachable, PeerRefused: it failed or was lost, and nobody has called `connect`
        late enough after that.
        """
        met = self._met(peer)
        return met.passport if met is not None else None

    def extra(self, peer: str) -> bytes:
        """What came with the passport of a peer that we have dialled; empty while it is not known.

        Raises as `passport`.
        """
        met = self._met(peer)
        return met.extra if met is not None else b""

    def _met(self, peer: str) -> Met | None:
        with self._lock:
            known = self._peers.get(peer)
            if known is None:
                self._check_room(peer)
                return None
            known.raise_failure()
            return known.outgoing.met if known.outgoing is not None else None

    def take_descriptors(self, peer: str) -> tuple[int, ...]:
        """Those that came with the passport; the caller's from now on. Empty the second time."""
        with self._lock:
            known = self._peers.get(peer)
            if known is None:
                return ()
            taken, known.descriptors = known.descriptors, ()
            return taken

    def met(self, peer: str) -> Passport | None:
        """The passport of a peer that has connected to us or we to it, be it lost since."""
        with self._lock:
            known = self._peers.get(peer)
            return known.passport if known is not None else None

    def send(self, peer: str, message: bytes) -> None:
        """In order, once connected; dials if need be. Losing the peer loses what is not there yet.

        Raises PeerUnreachable, PeerRefused: as `passport`, or it is too long, or too much waits.
        """
        if len(message) > self.config.max_message_bytes:
            raise PeerUnreachable(
                f"a message of {len(message)} bytes for {peer}; "
                f"at most {self.config.max_message_bytes} may be sent"
            )
        with self._lock:
            connection = self._outgoing(peer)
            unsent = connection.unsent_bytes
            if unsent + len(message) > self.config.max_outgoing_bytes:
                raise PeerUnreachable(
                    f"{peer} has {unsent} bytes of messages unread; "
                    f"at most {self.config.max_outgoing_bytes} may wait"
                )
            self._attempt(connection, partial(connection.send, message))
            self._tell()

    def receive(self) -> Sequence[Received]:
        """What has come since the last call. As long as nobody calls, senders have to wait."""
        with self._lock:
            taken = self._inbox.take()
            self._news = self._news or bool(self._inbox.due_losses)  # which had to wait for this
            for connection in list(self._paused):
                self._resume(connection)
            self._tell()
            return taken

    def lost_peers(self) -> Sequence[PeerLost]:
        """Since the last call; each after all its messages have been received."""
        with self._lock:
            return self._inbox.take_losses()

    def has_exited(self, peer: str) -> bool:
        """True is proof: the peer's process has ended (and `on_activity` was called then)."""
        with self._lock:
            known = self._peers.get(peer)
            return known is not None and known.exited

    def is_stranger(self, peer: str) -> bool:
        """True is proof: nothing has ever passed between us, and nothing is about to."""
        with self._lock:
            known = self._peers.get(peer)
            return known is None or known.is_stranger

    def forget(self, peer: str) -> None:
        """Nobody will ask about this peer any more. Harmless while it is connected."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and not known.connected:
                self._forget(known)

    def close(self) -> None:
        """Say what is left to say, then let go of all sockets, descriptors and the thread."""
        with self._lock:
            if self._closing_by is not None:
                return
            self._closing_by = time.monotonic() + self.config.linger_s
            self._stop_listening()
            if self._thread.ident is not None:
                self._poller.wake()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
            assert not self._thread.is_alive(), "on_activity does not return"
        with self._lock:
            self._release()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._over():
            ready = self._poller.wait(self._patience_s())
            with self._lock:
                for handler, events in ready:
                    handler(events)
                self._expire()
                told, self._news = self._news, False
            if told:
                self._on_activity()

    def _over(self) -> bool:
        with self._lock:
            if self._closing_by is None:
                return False
            unsent = any(p.outgoing and p.outgoing.unsent_bytes for p in self._peers.values())
            return not unsent or time.monotonic() >= self._closing_by

    def _patience_s(self) -> float | None:
        """Until the next deadline; None: there is none."""
        with self._lock:
            instants = [c.deadline for c in self._handshaking if c.deadline is not None]
            instants += [at for at in (self._accept_at, self._closing_by) if at is not None]
            return max(0.0, min(instants) - time.monotonic()) if instants else None

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in list(self._handshaking):
            if connection.deadline is not None and now >= connection.deadline:
                self._drop(connection, self._timed_out(connection))
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._poller.watch(self._listener.fileno(), READ, self._on_listener)

    def _timed_out(self, connection: Connection) -> PeerUnreachable:
        if connection.connecting:
            return PeerUnreachable(f"not connected within {self.config.connect_timeout_s:g} s")
        seconds = self.config.handshake_timeout_s
        return PeerUnreachable(f"did not say who it is within {seconds:g} s")

    def _tell(self) -> None:
        """Let the thread do what callers of this class must not be kept by."""
        if (self._news or self._handshaking) and self._closing_by is None:
            self._poller.wake()

    # ------------------------------------------------------------------ dialling and listening

    def _outgoing(self, endpoint: str) -> Connection:
        peer = self._dialled(endpoint)
        if peer is None:
            self._check_room(endpoint)
        if peer is not None:
            peer.raise_failure()
        if peer is None or peer.outgoing is None:
            raise PeerUnreachable(f"{endpoint}: this node has closed")
        return peer.outgoing

    def _dialled(self, endpoint: str) -> Peer | None:
        """Dial if need be. None: there is no room for one more peer, or this node has closed."""
        peer = self._peers.get(endpoint) or self._make_peer(endpoint)
        if peer is None or self._closing_by is not None:
            return None
        if peer.outgoing is None and time.monotonic() >= peer.retry_at:
            peer.failure = None
            self._dial(peer)
        return peer

    def _dial(self, peer: Peer) -> None:
        try:
            opened = self._medium.dial(peer.endpoint)
        except PeerUnreachable as error:
            self._lose(peer, error)
            return
        connection = Connection(
            opened,
            handshake.dial(self._me, peer.endpoint),
            peer=peer.endpoint,
            deadline=time.monotonic() + self.config.connect_timeout_s,
            takes_descriptors=self._medium.passes_descriptors,
        )
        connection.connecting = True
        peer.outgoing = connection
        self._add(connection)

    def _on_listener(self, _events: int) -> None:
        if self._closing_by is not None:  # since the poller saw it
            return
        for _ in range(_MAX_ACCEPTS):
            try:
                opened, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                logger.warning("cannot take in peers for now: %s", error)
                self._poller.unwatch(self._listener.fileno())
                self._accept_at = time.monotonic() + _ACCEPT_PAUSE_S
                return
            self._take_in(opened)

    def _take_in(self, opened: socket.socket) -> None:
        opened.setblocking(False)
        self._make_room_for_stranger()
        connection = Connection(
            opened,
            handshake.listen(self._me),
            peer=None,
            deadline=time.monotonic() + self.config.handshake_timeout_s,
            takes_descriptors=False,
            descriptors=self._descriptors,
        )
        self._add(connection)
        self._attempt(connection, partial(self._admit, connection, opened))

    def _admit(self, connection: Connection, opened: socket.socket) -> None:
        self._medium.admit(opened)
        connection.begin()

    def _make_room_for_stranger(self) -> None:
        strangers = [connection for connection in self._handshaking if not connection.dialled]
        if len(strangers) >= self.config.max_strangers:
            self._drop(strangers[0], PeerRefused("too many others are waiting to be let in"))

    def _add(self, connection: Connection) -> None:
        self._handshaking[connection] = None
        self._poller.watch(
            connection.fileno(), self._interest(connection), partial(self._on_events, connection)
        )

    # ------------------------------------------------------------------ connections

    def _on_events(self, connection: Connection, events: int) -> None:
        self._attempt(connection, partial(self._advance, connection, events))

    def _attempt(self, connection: Connection, step: Callable[[], None]) -> None:
        """If it fails, the peer is lost."""
        if not connection.is_watched():  # since the poller saw it
            return
        try:
            step()
        except PeerUnreachable as error:
            self._drop(connection, error)
        else:
            if connection.is_watched():
                self._poller.change(connection.fileno(), self._interest(connection))

    def _interest(self, connection: Connection) -> int:
        return READ | WRITE if connection.wants_to_write else READ

    def _advance(self, connection: Connection, events: int) -> None:
        if connection.connecting:
            self._greet(connection)
            return
        connection.flush()
        if events & ~WRITE and connection.read():
            self._take_messages(connection)

    def _greet(self, connection: Connection) -> None:
        try:
            connection.check_connected()
        except OSError as error:
            raise cannot_reach(connection.peer or "", error) from error
        self._medium.admit(connection.socket)
        connection.deadline = time.monotonic() + self.config.handshake_timeout_s
        connection.begin()

    def _take_messages(self, connection: Connection) -> None:
        while True:
            if connection.met is not None and not connection.dialled and self._inbox.full:
                self._pause(connection)
                return
            message = connection.next_message()
            if message is None:
                return
            self._hear(connection, message)

    def _hear(self, connection: Connection, message: bytes) -> None:
        if connection.met is None:
            met = connection.hear(message, self.config.max_message_bytes)
            if met is not None:
                self._meet(connection, met)
        elif connection.dialled:
            raise PeerRefused("it spoke where it was to listen")
        else:
            self._inbox.put(Received(connection.met.passport.endpoint, message))
            self._news = True

    def _pause(self, connection: Connection) -> None:
        """Read no more, and do not watch: the end of a connection would be reported for ever."""
        if not connection.paused:
            connection.paused = True
            self._paused.add(connection)
            self._poller.unwatch(connection.fileno())

    def _resume(self, connection: Connection) -> None:
        connection.paused = False
        self._paused.discard(connection)
        self._poller.watch(connection.fileno(), READ, partial(self._on_events, connection))
        self._attempt(connection, partial(self._take_messages, connection))

    # ------------------------------------------------------------------ peers

    def _meet(self, connection: Connection, met: Met) -> None:
        """Who is at the other end is proven."""
        endpoint = met.passport.endpoint
        peer = self._peers.get(endpoint) or self._make_peer(endpoint)
        if peer is None:
            raise self._no_room(endpoint)
        if not connection.dialled:
            if peer.incoming is not None:
                self._lose(peer, PeerUnreachable(f"{endpoint} has connected anew"))
            peer.incoming = connection
            peer.failure, peer.retry_at = None, 0.0
        peer.passport = met.passport
        peer.descriptors += connection.take_descriptors()
        del self._handshaking[connection]
        self._watch_process(peer, met.passport.process)
        self._news = True
        connection.welcome()

    def _watch_process(self, peer: Peer, process: ProcessIdentity) -> None:
        if peer.exited or peer.pidfd is not None:
            return
        if not self._me.passport.process.sees_pids_of(process):
            return
        try:
            peer.pidfd = watch(process)
        except ProcessExited:
            peer.exited = True
        if peer.pidfd is not None:
            self._poller.watch(peer.pidfd, READ, partial(self._on_exit, peer))

    def _on_exit(self, peer: Peer, _events: int) -> None:
        if peer.pidfd is None:
            return
        self._unwatch_process(peer)
        peer.exited = True
        self._news = True
        if peer.connected:
            self._lose(peer, PeerUnreachable("its process has exited"))

    def _unwatch_process(self, peer: Peer) -> None:
        if peer.pidfd is not None:
            self._poller.unwatch(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None

    def _drop(self, connection: Connection, error: PeerUnreachable) -> None:
        """This connection is of no use any more, and so the peer is lost, if it is one."""
        if connection.closed:
            return
        if connection.dialled or connection not in self._handshaking:
            peer = self._peers[connection.peer or ""]
            self._lose(peer, error)
            return
        logger.info("a connection to %s was dropped: %s", self.endpoint, error)
        if isinstance(error, PeerRefused):
            connection.refuse(handshake.refusal(error))
        self._discard(connection)

    def _lose(self, peer: Peer, error: PeerUnreachable) -> None:
        if peer.incoming is not None:
            self._hear_last_words(peer.incoming)
        self._disconnect(peer)
        named = str(error) if peer.endpoint in str(error) else f"{peer.endpoint}: {error}"
        peer.failure = type(error)(named)
        peer.retry_at = time.monotonic() + self.config.retry_after_s
        self._inbox.put_loss(PeerLost(peer.endpoint, peer.failure))
        self._news = True

    def _disconnect(self, peer: Peer) -> None:
        for connection in (peer.incoming, peer.outgoing):
            if connection is not None:
                self._discard(connection)
        peer.incoming = peer.outgoing = None
        peer.close_descriptors()

    def _hear_last_words(self, connection: Connection) -> None:
        """It may have said something just before it went; as much as there is room for."""
        try:
            while not connection.paused and connection.read():
                self._take_messages(connection)
        except PeerUnreachable:
            return

    def _discard(self, connection: Connection) -> None:
        self._handshaking.pop(connection, None)
        self._paused.discard(connection)
        if not connection.closed:
            self._poller.unwatch(connection.fileno())
            connection.close()

    # ------------------------------------------------------------------ room

    def _make_peer(self, endpoint: str) -> Peer | None:
        """None: there is no room for it."""
        if not self._has_room():
            return None
        peer = self._peers[endpoint] = Peer(endpoint)
        return peer

    def _has_room(self) -> bool:
        if len(self._peers) < self.config.max_peers:
            return True
        for peer in list(self._peers.values()):
            if peer.forgettable:
                self._forget(peer)
                return True
        return False

    def _check_room(self, endpoint: str) -> None:
        if self._closing_by is None and not self._has_room():
            raise self._no_room(endpoint)

    def _no_room(self, endpoint: str) -> PeerRefused:
        return PeerRefused(f"{endpoint}: there are {self.config.max_peers} peers already")

    def _forget(self, peer: Peer) -> None:
        self._unwatch_process(peer)
        peer.close_descriptors()
        del self._peers[peer.endpoint]

    # ------------------------------------------------------------------ the end

    def _stop_listening(self) -> None:
        self._accept_at = None
        self._poller.unwatch(self._listener.fileno())
        self._listener.close()

    def _release(self) -> None:
        for stranger in list(self._handshaking):
            self._discard(stranger)
        for peer in self._peers.values():
            self._disconnect(peer)
            self._unwatch_process(peer)
        self._poller.close()
