"""The peers that a node knows: who they are, how it dials them, and how it loses them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial

from kv_transfer.peering.config import PeeringConfig
from kv_transfer.peering.connection import Connection
from kv_transfer.peering.handshake import Met
from kv_transfer.peering.inbox import Inbox
from kv_transfer.peering.lines import Lines
from kv_transfer.peering.medium import Medium
from kv_transfer.peering.passport import ProcessIdentity
from kv_transfer.peering.peer import Peer
from kv_transfer.peering.poller import READ, Poller
from kv_transfer.peering.process_watch import ProcessExited, watch
from kv_transfer.transport import PeerLost, PeerRefused, PeerUnreachable


class Roster:
    """At most `max_peers`; those of whom nothing is known make room. Used by one thread at a time.

    The connections to them are made and read by `lines`.
    """

    def __init__(self, poller: Poller, medium: Medium, inbox: Inbox, config: PeeringConfig) -> None:
        self.lines = Lines(
            poller, medium, inbox, config, on_met=self._meet, on_lost=self._on_line_lost
        )
        self._poller = poller
        self._inbox = inbox
        self._config = config
        self._own_process = ProcessIdentity.own()
        self._peers: dict[str, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def get(self, endpoint: str) -> Peer | None:
        return self._peers.get(endpoint)

    def get_or_make(self, endpoint: str) -> Peer | None:
        """None: there is no room for it."""
        known = self._peers.get(endpoint)
        if known is None and self._has_room():
            known = self._peers[endpoint] = Peer(endpoint)
        return known

    def check_room(self, endpoint: str) -> None:
        """Raise PeerRefused if there is none for this peer, whom nobody knows yet."""
        if not self._has_room():
            raise self._no_room(endpoint)

    def forget(self, peer: Peer) -> None:
        self._unwatch_process(peer)
        peer.close_descriptors()
        del self._peers[peer.endpoint]

    def close(self) -> None:
        """Let go of all connections and descriptors."""
        self.lines.discard_strangers()
        for peer in self:
            self._disconnect(peer)
            self._unwatch_process(peer)

    def _has_room(self) -> bool:
        if len(self._peers) < self._config.max_peers:
            return True
        for peer in list(self):
            if peer.forgettable:
                self.forget(peer)
                return True
        return False

    def _no_room(self, endpoint: str) -> PeerRefused:
        return PeerRefused(f"{endpoint}: there are {self._config.max_peers} peers already")

    # ------------------------------------------------------------------ met and lost

    def dial(self, peer: Peer) -> None:
        """If that fails at once, it is lost."""
        peer.failure = None
        try:
            peer.outgoing = self.lines.dial(peer.endpoint)
        except PeerUnreachable as error:
            self._lose(peer, error)

    def _meet(self, connection: Connection, met: Met) -> None:
        """Who is at the other end is proven."""
        endpoint = met.passport.endpoint
        peer = self.get_or_make(endpoint)
        if peer is None:
            raise self._no_room(endpoint)
        if not connection.dialled:
            if peer.incoming is not None:
                self._lose(peer, PeerUnreachable(f"{endpoint} has connected anew"))
            peer.incoming = connection
            peer.failure, peer.retry_at = None, 0.0
        peer.passport = met.passport
        peer.descriptors += connection.take_descriptors()
        self._watch_process(peer, met.passport.process)
        self._inbox.news = True
        self.lines.let_in(connection)

    def _on_line_lost(self, connection: Connection, error: PeerUnreachable) -> None:
        self._lose(self._peers[connection.peer or ""], error)

    def _lose(self, peer: Peer, error: PeerUnreachable) -> None:
        if peer.incoming is not None:
            self.lines.hear_last_words(peer.incoming)
        self._disconnect(peer)
        named = str(error) if peer.endpoint in str(error) else f"{peer.endpoint}: {error}"
        peer.failure = type(error)(named)
        peer.retry_at = time.monotonic() + self._config.retry_after_s
        self._inbox.put_loss(PeerLost(peer.endpoint, peer.failure))

    def _disconnect(self, peer: Peer) -> None:
        for connection in (peer.incoming, peer.outgoing):
            if connection is not None:
                self.lines.discard(connection)
        peer.incoming = peer.outgoing = None
        peer.close_descriptors()

    # ------------------------------------------------------------------ their processes

    def _watch_process(self, peer: Peer, process: ProcessIdentity) -> None:
        """Learn of its end, if that can be seen from here."""
        if peer.exited or peer.pidfd is not None or not self._own_process.sees_pids_of(process):
            return
        try:
            peer.pidfd = watch(process)
        except ProcessExited:
            peer.exited = True
        if peer.pidfd is not None:
            self._poller.watch(peer.pidfd, READ, partial(self._on_exit, peer))

    def _unwatch_process(self, peer: Peer) -> None:
        if peer.pidfd is not None:
            self._poller.unwatch(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None

    def _on_exit(self, peer: Peer, _events: int) -> None:
        if peer.pidfd is None:  # since the poller saw it
            return
        self._unwatch_process(peer)
        peer.exited = True
        self._inbox.news = True
        if peer.connected:
            self._lose(peer, PeerUnreachable("its process has exited"))
