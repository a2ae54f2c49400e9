"""One node among its peers: who is there, what they say, and whether they are gone.

A node listens, and dials whom it wants to send to or learn about. A dialled connection carries
messages one way, from dialler to listener; who wants to answer dials back. The end of either of
the two is enough to call a peer lost; only the end of its process is proof that it does nothing
any more.

    connect ─► handshake ─► passport known, messages ─► lost_peers ─► (after a while) connect …
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.layout import PeerPool
from kv_transfer.peering.cluster_token import ClusterToken
from kv_transfer.peering.config import PeeringConfig
from kv_transfer.peering.connection import Connection
from kv_transfer.peering.door import Door
from kv_transfer.peering.handshake import Identity, Met
from kv_transfer.peering.inbox import Inbox
from kv_transfer.peering.medium import Medium
from kv_transfer.peering.passport import Passport, ProcessIdentity, digest_of
from kv_transfer.peering.peer import Peer
from kv_transfer.peering.poller import Poller
from kv_transfer.peering.roster import Roster
from kv_transfer.transport import PeerLost, PeerUnreachable, Received

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
        listener, self.endpoint = medium.listen(f"{readable}-{secrets.token_hex(8)}")
        self._lock = threading.Lock()
        self._poller = Poller()
        self._inbox = Inbox(config.max_inbox_messages, config.max_inbox_bytes)
        self._peers = Roster(self._poller, medium, self._inbox, config)
        self._lines = self._peers.lines
        self._door = Door(listener, self._poller, self._lines.take_in)
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
        passport = Passport(
            endpoint=self.endpoint,
            pool=pool,
            process=ProcessIdentity.own(),
            num_descriptors=len(descriptors),
            extra_bytes=len(extra),
            extra_digest=digest_of(extra),
        )
        me = Identity(self._token, passport, extra, self.config.max_extra_bytes)
        self._lines.start(me, descriptors)
        self._door.open()
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
            self._lines.attempt(connection, partial(connection.send, message))
            self._tell()

    def receive(self) -> Sequence[Received]:
        """What has come since the last call. As long as nobody calls, senders have to wait."""
        with self._lock:
            taken = self._inbox.take()
            self._lines.resume()
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
                self._peers.forget(known)

    def close(self) -> None:
        """Say what is left to say, then let go of all sockets, descriptors and the thread."""
        with self._lock:
            if self._closing_by is not None:
                return
            self._closing_by = time.monotonic() + self.config.linger_s
            self._door.close()
            if self._thread.ident is not None:
                self._poller.wake()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
            assert not self._thread.is_alive(), "on_activity does not return"
        with self._lock:
            self._peers.close()
            self._poller.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._over():
            ready = self._poller.wait(self._patience_s())
            with self._lock:
                for handler, events in ready:
                    handler(events)
                self._expire()
                told = self._inbox.take_news()
            if told:
                self._on_activity()

    def _over(self) -> bool:
        with self._lock:
            if self._closing_by is None:
                return False
            unsent = any(p.outgoing and p.outgoing.unsent_bytes for p in self._peers)
            return not unsent or time.monotonic() >= self._closing_by

    def _patience_s(self) -> float | None:
        """Until the next deadline; None: there is none."""
        with self._lock:
            deadlines = (self._lines.next_deadline(), self._door.opens_at, self._closing_by)
            instants = [at for at in deadlines if at is not None]
            return max(0.0, min(instants) - time.monotonic()) if instants else None

    def _expire(self) -> None:
        now = time.monotonic()
        self._lines.expire(now)
        self._door.open_if_due(now)

    def _tell(self) -> None:
        """Let the thread do what callers of this class must not be kept by."""
        if (self._inbox.news or self._lines.some_handshake) and self._closing_by is None:
            self._poller.wake()

    # ------------------------------------------------------------------ dialling

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
        peer = self._peers.get_or_make(endpoint)
        if peer is None or self._closing_by is not None:
            return None
        if peer.outgoing is None and time.monotonic() >= peer.retry_at:
            self._peers.dial(peer)
        return peer

    def _check_room(self, endpoint: str) -> None:
        if self._closing_by is None:
            self._peers.check_room(endpoint)
