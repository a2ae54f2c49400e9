"""The connections of a node, from the first word of a handshake to the last message.

dial    ─► connecting ─┐
take in ───────────────┴─► handshake ─► met ─► messages ◄─► paused, while nobody takes them
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.peering import handshake
from kv_transfer.peering.config import PeeringConfig
from kv_transfer.peering.connection import Connection
from kv_transfer.peering.handshake import Identity, Met
from kv_transfer.peering.inbox import Inbox
from kv_transfer.peering.medium import Medium, cannot_reach
from kv_transfer.peering.poller import READ, WRITE, Poller
from kv_transfer.transport import PeerRefused, PeerUnreachable, Received

logger = logging.getLogger(__name__)

OnMet = Callable[[Connection, Met], None]
OnLost = Callable[[Connection, PeerUnreachable], None]


class Lines:
    """Used by one thread at a time.

    `on_met` is told who is at the other end, and calls `let_in` or raises PeerRefused. `on_lost`
    is told what ends a connection, which it has to `discard`, unless that is of a stranger.
    """

    def __init__(
        self,
        poller: Poller,
        medium: Medium,
        inbox: Inbox,
        config: PeeringConfig,
        *,
        on_met: OnMet,
        on_lost: OnLost,
    ) -> None:
        self._poller = poller
        self._medium = medium
        self._inbox = inbox
        self._config = config
        self._on_met = on_met
        self._on_lost = on_lost
        self._handshaking: dict[Connection, None] = {}  # oldest first
        self._paused: set[Connection] = set()

    def start(self, me: Identity, descriptors: Sequence[int]) -> None:
        """Before any connection is made. `descriptors` go to those that dial us."""
        self._me = me
        self._descriptors = tuple(descriptors)

    @property
    def some_handshake(self) -> bool:
        return bool(self._handshaking)

    # ------------------------------------------------------------------ beginnings

    def dial(self, endpoint: str) -> Connection:
        """Raises PeerUnreachable: nobody listens there, or this is no endpoint."""
        connection = Connection(
            self._medium.dial(endpoint),
            handshake.dial(self._me, endpoint),
            peer=endpoint,
            deadline=time.monotonic() + self._config.connect_timeout_s,
            takes_descriptors=self._medium.passes_descriptors,
        )
        connection.connecting = True
        self._add(connection)
        return connection

    def take_in(self, opened: socket.socket) -> None:
        """Somebody has dialled us."""
        self._make_room_for_stranger()
        connection = Connection(
            opened,
            handshake.listen(self._me),
            peer=None,
            deadline=time.monotonic() + self._config.handshake_timeout_s,
            takes_descriptors=False,
            descriptors=self._descriptors,
        )
        self._add(connection)
        self.attempt(connection, partial(self._admit, connection))

    def let_in(self, connection: Connection) -> None:
        """Its peer is known, and one to be spoken with."""
        del self._handshaking[connection]
        connection.welcome()

    def _make_room_for_stranger(self) -> None:
        strangers = [connection for connection in self._handshaking if not connection.dialled]
        if len(strangers) >= self._config.max_strangers:
            self._drop(strangers[0], PeerRefused("too many others are waiting to be let in"))

    def _admit(self, connection: Connection) -> None:
        self._medium.admit(connection.socket)
        connection.begin()

    def _add(self, connection: Connection) -> None:
        self._handshaking[connection] = None
        self._watch(connection, self._interest(connection))

    # ------------------------------------------------------------------ handshakes have deadlines

    def next_deadline(self) -> float | None:
        """None: there is none."""
        instants = [c.deadline for c in self._handshaking if c.deadline is not None]
        return min(instants, default=None)

    def expire(self, now: float) -> None:
        for connection in list(self._handshaking):
            if connection.deadline is not None and now >= connection.deadline:
                self._drop(connection, self._timed_out(connection))

    def _timed_out(self, connection: Connection) -> PeerUnreachable:
        if connection.connecting:
            return PeerUnreachable(f"not connected within {self._config.connect_timeout_s:g} s")
        seconds = self._config.handshake_timeout_s
        return PeerUnreachable(f"did not say who it is within {seconds:g} s")

    # ------------------------------------------------------------------ words

    def attempt(self, connection: Connection, step: Callable[[], None]) -> None:
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

    def _watch(self, connection: Connection, events: int) -> None:
        self._poller.watch(connection.fileno(), events, partial(self._on_events, connection))

    def _on_events(self, connection: Connection, events: int) -> None:
        self.attempt(connection, partial(self._advance, connection, events))

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
        connection.deadline = time.monotonic() + self._config.handshake_timeout_s
        self._admit(connection)

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
            met = connection.hear(message, self._config.max_message_bytes)
            if met is not None:
                self._on_met(connection, met)
        elif connection.dialled:
            raise PeerRefused("it spoke where it was to listen")
        else:
            self._inbox.put(Received(connection.met.passport.endpoint, message))

    def _pause(self, connection: Connection) -> None:
        """Read no more, and do not watch: the end of a connection would be reported for ever."""
        if not connection.paused:
            connection.paused = True
            self._paused.add(connection)
            self._poller.unwatch(connection.fileno())

    def resume(self) -> None:
        """There is room in the inbox again."""
        for connection in list(self._paused):
            connection.paused = False
            self._paused.discard(connection)
            self._watch(connection, READ)
            self.attempt(connection, partial(self._take_messages, connection))

    # ------------------------------------------------------------------ ends

    def hear_last_words(self, connection: Connection) -> None:
        """It may have said something just before it went; as much as there is room for."""
        try:
            while not connection.paused and connection.read():
                self._take_messages(connection)
        except PeerUnreachable:
            return

    def discard(self, connection: Connection) -> None:
        self._handshaking.pop(connection, None)
        self._paused.discard(connection)
        if not connection.closed:
            self._poller.unwatch(connection.fileno())
            connection.close()

    def discard_strangers(self) -> None:
        for connection in list(self._handshaking):
            self.discard(connection)

    def _drop(self, connection: Connection, error: PeerUnreachable) -> None:
        """It is of no use any more, and so its peer is lost, if it has one."""
        if connection.closed:
            return
        if connection.dialled or connection not in self._handshaking:
            self._on_lost(connection, error)
            return
        endpoint = self._me.passport.endpoint
        logger.info("a connection to %s was dropped: %s", endpoint, error)
        if isinstance(error, PeerRefused):
            connection.refuse(handshake.refusal(error))
        self.discard(connection)
