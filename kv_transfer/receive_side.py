"""D's side of a connector: the hand-offs that this node receives.

    add ─ (PrefillStarted) ─ reserve ─ open: destination … commit, verified ─ recving
                                 ▲                 └ lost ─ retarget: another P, the same blocks
                                 └──────────────────────────────┘

Nothing here waits. What is asked of P and not answered is asked again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from kv_transfer.desk import Desk, reason_of
from kv_transfer.events import EventKind
from kv_transfer.sink import HandoffSink
from kv_transfer.states import HandoffState, Reason
from kv_transfer.transport import PeerUnreachable
from kv_transfer.wire import (
    Arrived,
    Cancel,
    Closed,
    Commit,
    FromPrefill,
    Heartbeat,
    PrefillStarted,
    Pushing,
    Revoke,
    Revoked,
)
from protocol import HandoffTicket

_MAX_OVER = 4096  # ended hand-offs that late messages are recognised of


class ReceiveSide:
    """All sinks of a node, by the scheduler's name of the request."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.sinks: dict[str, HandoffSink] = {}
        self.recving: dict[str, tuple[int, ...]] = {}  # loads that have ended, with their tokens
        self.revoked: list[str] = []  # loads whose blocks P does not want any more
        self._by_ticket: dict[HandoffTicket, HandoffSink] = {}  # the same, for messages
        self._early: dict[HandoffTicket, tuple[str, float]] = {}  # starts before the job came
        self._reserved: list[HandoffSink] = []  # with the step that is being planned
        self._over: OrderedDict[HandoffTicket, None] = OrderedDict()

    @property
    def idle(self) -> bool:
        return not (self.sinks or self._early)

    # ------------------------------------------------------------------ the scheduler's side

    def add(self, ticket: HandoffTicket, peer: str) -> bool:
        """Whether P has started already. Raises PeerUnreachable: there is no way to `peer`."""
        peer, now, deadline = self._meet(peer)
        return self._begin(HandoffSink(ticket, peer, started_at=now, deadline=deadline))

    def retarget(self, request_id: str, ticket: HandoffTicket, peer: str) -> bool:
        """Have the KV of a request come from another P; it keeps its place and its blocks.

        False: its KV is here already, or the old P may still write to its blocks, and gets no heir.
        Raises PeerUnreachable: there is no way to `peer`. What was before goes on.
        """
        sink = self.sinks.get(request_id)
        if sink is None or sink.released:
            return False
        peer, now, deadline = self._meet(peer)
        self._end(sink, Reason.CANCELLED)
        if not self._fence(sink):
            self._desk.retargeted["given_up"] += 1
            return False
        self._forget(sink)
        self._desk.forget_events(request_id)
        heir = sink.heir(ticket, peer, now, deadline)
        self._reserved = [other for other in self._reserved if other is not sink]
        if heir.inherited:  # the old step may not have begun; the new P waits for the next one
            self._reserved.append(heir)
        self._desk.retargeted["kept" if heir.inherited else "queued"] += 1
        self._begin(heir)
        return True

    def _meet(self, peer: str) -> tuple[str, float, float]:
        """The transport's name of the peer, the time, and until when it has to start."""
        desk, now = self._desk, self._desk.clock()
        peer = desk.transport.resolve(peer)
        desk.transport.connect(peer)  # so that its death is noticed before it has said a word
        return peer, now, now + desk.config.reserve_timeout_s

    def _begin(self, sink: HandoffSink) -> bool:
        """Whether P has started already."""
        self.sinks[sink.request_id] = self._by_ticket[sink.ticket] = sink
        starter, _ = self._early.pop(sink.ticket, ("", 0.0))
        if starter == sink.peer:
            self._note_start(sink)
        return sink.started

    def drop(self, request_id: str, reason: Reason) -> None:
        """Forget a hand-off for which the scheduler was never asked."""
        sink = self.sinks[request_id]
        self._end(sink, reason)
        self._forget(sink)

    def reserve(
        self, sink: HandoffSink, first_block: int, block_ids: Sequence[int], num_tokens: int
    ) -> None:
        sink.reserve(first_block, block_ids, num_tokens)
        self._reserved.append(sink)

    def open_reserved(self) -> None:
        """From now on P may write: what was computed before in those blocks has been computed."""
        reserved, self._reserved = self._reserved, []
        for sink in reserved:
            if sink.state is not HandoffState.READY or sink.opened:
                continue  # P gave up meanwhile, or the blocks were taken back
            self._desk.transport.open(sink.ticket, sink.peer, sink.block_ids)
            sink.opened = True
            if not sink.inherited:
                self._desk.tell(EventKind.RESERVED, sink.request_id)
            if sink.started:  # else P may not even have the job, and is told when it starts
                self._renew(sink)
                self._desk.send(sink.peer, sink.destination())

    def revoke(self, request_id: str) -> bool:
        """Whether the blocks of this reservation can be taken back; `revoked` names it then.

        If P knows them already it is asked to give them up, which it may refuse.
        """
        sink = self.sinks.get(request_id)
        if sink is None or not sink.revocable:
            return False
        if sink.fenced or not sink.offered:
            self._take_back(sink)
        elif not sink.revoking:
            self._ask_back(sink)
        return True

    def release(self, sink: HandoffSink) -> None:
        """The request has ended here before its KV was there."""
        sink.released = True
        self._end(sink, Reason.CANCELLED)

    def abandon(self, request_id: str, reason: Reason) -> None:
        """The request is wanted here no more, and is about to end. Harmless if there is none."""
        sink = self.sinks.get(request_id)
        if sink is not None:
            self._end(sink, reason)

    # ------------------------------------------------------------------ moving on

    def settle(self) -> None:
        """Note what has ended, and repeat what was not answered."""
        now = self._desk.clock()
        for sink in list(self.sinks.values()):
            self._settle(sink, now)
        for ticket, (peer, deadline) in list(self._early.items()):
            if now > deadline:
                del self._early[ticket]
                self._desk.send(peer, Cancel(ticket, Reason.DEADLINE))

    def next_deadline(self) -> float | None:
        times = [deadline for _, deadline in self._early.values()]
        for sink in self.sinks.values():
            if not sink.state.ended or sink.kept:
                times.append(sink.deadline)
            if self._asks(sink):
                times.append(sink.ask_at)
        return min(times, default=None)

    def lose_peer(self, peer: str, error: PeerUnreachable) -> int:
        """End what is under way with it; how much that was."""
        mine = [s for s in self.sinks.values() if s.peer == peer and not s.state.ended]
        for sink in mine:
            self._lose(sink, reason_of(error), str(error))
        return len(mine)

    def stop(self) -> None:
        for sink in self.sinks.values():
            if not sink.state.ended:
                self._desk.send(sink.peer, Cancel(sink.ticket, Reason.CANCELLED))

    @staticmethod
    def _leaves_word_to(sink: HandoffSink, now: float) -> bool:
        """Whether P may end its writes: a fence would fail them before P hears that D drains."""
        polite = sink.reason is Reason.DRAINING and sink.offered
        return polite and not sink.fenced and now <= sink.ask_at

    @staticmethod
    def _asks(sink: HandoffSink) -> bool:
        """Whether P owes an answer: that it writes no more."""
        return sink.revoking or (sink.state.ended and not sink.fenced)

    def _settle(self, sink: HandoffSink, now: float) -> None:
        if sink.verified():
            if sink.reason is None:
                self._desk.tell(EventKind.COMMITTED, sink.request_id)
            else:
                self._note_loss(sink)
        if not sink.state.ended and now > sink.deadline:
            self._lose(sink, Reason.DEADLINE)
            self._cancel(sink)
        if sink.state.ended and not self._leaves_word_to(sink, now):
            self._fence(sink)
            self._settle_ended(sink)
        if self._asks(sink) and now > sink.ask_at:
            self._ask_back(sink) if sink.revoking else self._cancel(sink)

    def _fence(self, sink: HandoffSink) -> bool:
        """Close the ticket; whether there is proof that P writes to its blocks no more."""
        # Also where P gave proof: the ticket is over. What P never knew, it cannot write to.
        proven = self._desk.transport.fence(sink.ticket) or not sink.offered
        sink.fenced = sink.fenced or proven
        return sink.fenced

    def _settle_ended(self, sink: HandoffSink) -> None:
        if sink.kept and self._desk.clock() > sink.deadline:
            sink.deadline = math.inf
            self._desk.tell(EventKind.LAPSED, sink.request_id)
        if sink.fenced and (sink.state is HandoffState.COMMITTED or sink.released):
            self._forget(sink)
            if sink.block_ids:
                self.recving[sink.request_id] = sink.tokens

    def _forget(self, sink: HandoffSink) -> None:
        del self.sinks[sink.request_id], self._by_ticket[sink.ticket]
        self._desk.count(sink.state, sink.reason)
        self._over[sink.ticket] = None
        if len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)

    def _end(self, sink: HandoffSink, reason: Reason) -> None:
        if not sink.state.ended:
            sink.end(reason)
            self._cancel(sink)

    def _lose(self, sink: HandoffSink, reason: Reason, detail: str = "") -> None:
        sink.end(reason, detail)
        self._note_loss(sink)

    def _note_loss(self, sink: HandoffSink) -> None:
        """Another P may take over. Until then, blocks are idle: so not for ever."""
        sink.deadline = self._desk.clock() + self._desk.config.transfer_timeout_s
        self._desk.tell(EventKind.LOST, sink.request_id, sink.reason, sink.detail)
        self._desk.log_end(sink.ticket, sink.state, sink.reason, sink.detail)

    def _note_start(self, sink: HandoffSink) -> None:
        sink.started = True
        self._renew(sink)

    def _renew(self, sink: HandoffSink) -> None:
        """P has shown that it is alive."""
        deadline = self._desk.clock() + self._desk.config.transfer_timeout_s
        sink.deadline = deadline if sink.started else max(sink.deadline, deadline)

    def _cancel(self, sink: HandoffSink) -> None:
        self._ask(sink, Cancel(sink.ticket, sink.reason or Reason.CANCELLED))

    def _ask_back(self, sink: HandoffSink) -> None:
        sink.revoking = True
        self._ask(sink, Revoke(sink.ticket, sink.reservation))

    def _ask(self, sink: HandoffSink, question: Cancel | Revoke) -> None:
        sink.ask_at = self._desk.clock() + self._desk.config.heartbeat_s
        self._desk.send(sink.peer, question)

    def _take_back(self, sink: HandoffSink) -> None:
        self._desk.transport.fence(sink.ticket)  # P has no part in it: the ticket is only closed
        sink.take_back()
        self.revoked.append(sink.request_id)

    # ------------------------------------------------------------------ messages

    def receive(self, peer: str, message: FromPrefill) -> None:
        sink = self._by_ticket.get(message.ticket)
        if isinstance(message, Commit):
            # Also one that nobody waits for any more, or not yet: P need not say it again.
            self._desk.send(peer, Arrived(message.ticket))
        if sink is None:
            if isinstance(message, PrefillStarted):
                self._on_early(peer, message)
        elif sink.peer == peer:
            self._on_message(sink, message)

    def _on_message(self, sink: HandoffSink, message: FromPrefill) -> None:
        match message:
            case PrefillStarted():
                self._on_started(sink)
            case Pushing():
                self._renew(sink)
                sink.push_begins()
            case Heartbeat():
                self._renew(sink)
            case Commit():
                self._renew(sink)  # to verify it takes time, too
                self._on_commit(sink, message)
            case Closed():
                sink.fenced = True
                if not sink.state.ended and sink.commit is None:  # else it is a late answer
                    self._lose(sink, message.reason, message.detail)
            case Revoked():
                self._on_revoked(sink, message)

    def _on_early(self, peer: str, message: PrefillStarted) -> None:
        """P is faster than the job; or this hand-off is over here."""
        known = message.ticket in self._early
        if message.ticket in self._over:
            self._desk.send(peer, Cancel(message.ticket, Reason.CANCELLED))
        elif known or len(self._early) < self._desk.config.max_early:
            deadline = self._desk.clock() + self._desk.config.transfer_timeout_s
            self._early[message.ticket] = (peer, deadline)
        else:
            self._desk.send(peer, Cancel(message.ticket, Reason.DEADLINE))

    def _on_started(self, sink: HandoffSink) -> None:
        if sink.state.ended:
            self._cancel(sink)
            return
        first = not sink.started
        self._note_start(sink)
        if first:
            self._desk.tell(EventKind.STARTED, sink.request_id)
        if sink.opened:
            self._desk.send(sink.peer, sink.destination())

    def _on_commit(self, sink: HandoffSink, commit: Commit) -> None:
        sink.fenced = True
        sink.revoking = False
        if sink.state.ended or sink.commit is not None:
            return
        if not sink.accept(commit, self._desk.digester, self._desk.pool.layout):
            self._note_loss(sink)

    def _on_revoked(self, sink: HandoffSink, message: Revoked) -> None:
        """P's word that it writes nothing there. If the request has ended, that is all it takes."""
        if message.reservation != sink.reservation or not sink.revoking:
            return
        if sink.state is HandoffState.READY:
            self._take_back(sink)
