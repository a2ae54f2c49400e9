"""What both sides of a connector share: messages to peers, events for the node, counts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kv_transfer.digest import Digester
from kv_transfer.events import EventKind, HandoffEvent
from kv_transfer.handoff_config import HandoffConfig
from kv_transfer.layout import BlockPoolMemory
from kv_transfer.states import HandoffState, Reason
from kv_transfer.transport import PeerLost, PeerRefused, PeerUnreachable, Transport
from kv_transfer.wire import Message, encode
from protocol import HandoffTicket

logger = logging.getLogger(__name__)


def reason_of(error: PeerUnreachable) -> Reason:
    """Why hand-offs with a peer end that is lost in this way."""
    return Reason.PEER_REFUSED if isinstance(error, PeerRefused) else Reason.PEER_LOST


class Desk:
    """One node's outgoing messages, events and counts. Used from the engine's thread only."""

    def __init__(
        self, transport: Transport, clock: Callable[[], float], config: HandoffConfig
    ) -> None:
        self.transport = transport
        self.clock = clock
        self.config = config
        self.pool: BlockPoolMemory
        self.digester: Digester
        self.events: list[HandoffEvent] = []
        self.ended: Counter[HandoffState] = Counter()
        self.failures: Counter[Reason] = Counter()
        self.outcomes: Counter[str] = Counter()  # what the node did about failures
        self.retargeted: Counter[str] = Counter()  # what became of a reservation, with another P
        self._outbox: list[tuple[str, Message]] = []

    @property
    def empty(self) -> bool:
        return not self._outbox

    def send(self, peer: str, message: Message) -> None:
        """With the next `flush`."""
        self._outbox.append((peer, message))

    def flush(self) -> list[PeerLost]:
        """The peers that could not be told something."""
        outbox, self._outbox = self._outbox, []
        lost = []
        for peer, message in outbox:
            try:
                self.transport.notify(peer, encode(message))
            except PeerUnreachable as error:
                lost.append(PeerLost(peer, error))
        return lost

    def tell(
        self, kind: EventKind, request_id: str, reason: Reason | None = None, detail: str = ""
    ) -> None:
        self.events.append(HandoffEvent(kind, request_id, reason, detail, self.clock()))

    def forget_events(self, request_id: str) -> None:
        """What was told of it, and not heard yet, is not true any more."""
        self.events = [event for event in self.events if event.request_id != request_id]

    def log_end(
        self, ticket: HandoffTicket, state: HandoffState, reason: Reason | None, detail: str
    ) -> None:
        """What went wrong can be seen; who has left, or was slow, by those who look closer.

        That a peer is lost is told once for all its hand-offs.
        """
        is_wrong = state is HandoffState.FAILED and reason is not Reason.PEER_LOST
        level = logging.WARNING if is_wrong else logging.INFO
        logger.log(level, "hand-off %s has ended: %s %s", ticket, reason, detail)

    def count(self, state: HandoffState, reason: Reason | None) -> None:
        """A hand-off has ended."""
        self.ended[state] += 1
        if reason is not None:
            self.failures[reason] += 1
