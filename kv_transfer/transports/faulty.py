"""Any transport, made worse according to a plan. With an empty plan it is the one inside.

    notify ─► dice ─► line of the peer ─► inner.notify     in order, unless a fault says otherwise
    write  ─► dice ─► (late) inner.write ─► (late) DONE

What is held back goes on when the node polls, which the alarm has it do when that is worth while:
so the inner transport is used from one thread here too. Messages count as sent when they are held
back or lost; that the peer is gone by then shows as it does without us.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.envelope import BadMessage
from kv_transfer.extents import Extents
from kv_transfer.layout import BlockPoolMemory, PeerPool
from kv_transfer.transport import (
    PeerLost,
    PeerUnreachable,
    Received,
    Transport,
    Write,
    WriteState,
)
from kv_transfer.transports.alarm import Alarm, Hold
from kv_transfer.transports.fault_dice import FaultDice
from kv_transfer.transports.fault_plan import OPEN, WRITE, Fault, FaultKind, FaultPlan
from kv_transfer.wire import decode
from protocol import HandoffTicket


@dataclass
class _Line:
    """Messages to one peer that have not left. The first of `waiting` keeps back the others."""

    waiting: deque[tuple[Hold | None, bytes]] = field(default_factory=deque)
    overtaken: list[tuple[Hold, bytes]] = field(default_factory=list)


class FaultyWrite:
    """Not started before `start`, not DONE before `end`; FAILED if it was never started."""

    def __init__(self, begin: Callable[[], Write], start: Hold | None, end: list[Hold]) -> None:
        self._begin = begin
        self._start = start
        self._end = end
        self._inner: Write | None = None
        self._abandoned = False

    @property
    def held(self) -> bool:
        """Whether it has yet to be started."""
        return self._inner is None and not self._abandoned

    @property
    def state(self) -> WriteState:
        if self._abandoned:
            return WriteState.FAILED
        if self._inner is None or not all(hold.over for hold in self._end):
            return WriteState.PENDING
        return self._inner.state

    def start_if_due(self) -> None:
        if self.held and (self._start is None or self._start.over):
            self._inner = self._begin()

    def abandon(self) -> None:
        """Its end will not be told any more; if it is not started, it never is."""
        if self._inner is None:
            self._abandoned = True
        self._end = []


class FaultyTransport:
    """One node's end; `node` is the name by which a plan knows it."""

    def __init__(self, inner: Transport, plan: FaultPlan, node: str) -> None:
        self._inner = inner
        self._plan = plan
        self._node = node
        self._dice = FaultDice(plan, node)
        self._lines: dict[str, _Line] = {}
        self._writes: list[FaultyWrite] = []  # that are held back at either end
        self._cuts: dict[str, Hold] = {}
        self._lost: list[PeerLost] = []
        self._link_free_at = 0.0  # when all that was written has gone over the throttled link
        self._closed = False

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        self._pool = pool
        self._on_activity = on_activity
        self._alarm = Alarm(self._node, on_activity)
        self._inner.register(pool, on_activity)

    # ------------------------------------------------------------------ peers

    def resolve(self, endpoint: str) -> str:
        return self._inner.resolve(endpoint)

    def connect(self, peer: str) -> None:
        if self._is_cut(peer):
            self._lose(peer)
        else:
            self._inner.connect(peer)

    def peer_pool(self, peer: str) -> PeerPool | None:
        self._check(peer)
        return self._inner.peer_pool(peer)

    def lost_peers(self) -> Sequence[PeerLost]:
        lost, self._lost = self._lost, []
        return [*lost, *self._inner.lost_peers()]

    def _check(self, peer: str) -> None:
        if self._closed or self._is_cut(peer):
            raise self._gone(peer)

    def _is_cut(self, peer: str) -> bool:
        hold = self._cuts.get(peer)
        if hold is not None and hold.over:
            del self._cuts[peer]
        return peer in self._cuts

    def _cut(self, peer: str, fault: Fault) -> None:
        self._cuts[peer] = self._alarm.hold(fault.seconds, fault.gate)
        self._lines.pop(peer, None)
        self._lose(peer)

    def _lose(self, peer: str) -> None:
        self._lost.append(PeerLost(peer, self._gone(peer)))
        self._on_activity()

    @staticmethod
    def _gone(peer: str) -> PeerUnreachable:
        return PeerUnreachable(f"{peer} cannot be reached: an injected fault")

    # ------------------------------------------------------------------ messages

    def notify(self, peer: str, message: bytes) -> None:
        self._check(peer)
        faults = self._faults_of(message) if self._dice.any else []
        if not faults and peer not in self._lines:
            self._inner.notify(peer, message)
            return
        if not _has(faults, FaultKind.DROP):
            self._put(self._lines.setdefault(peer, _Line()), message, faults)
            self._send_due(peer)
        for fault in faults:
            if fault.kind is FaultKind.CUT:
                self._cut(peer, fault)

    def _faults_of(self, message: bytes, only: FaultKind | None = None) -> list[Fault]:
        try:
            decoded = decode(message)
        except BadMessage:
            return []  # it is not for us to say
        name = str(type(decoded).__struct_config__.tag)
        return self._dice.roll(name, str(decoded.ticket), only)

    def _put(self, line: _Line, message: bytes, faults: list[Fault]) -> None:
        hold: Hold | None = None
        for fault in faults:
            if fault.kind is FaultKind.REORDER:
                line.overtaken.append((self._alarm.hold(fault.hold_s, fault.gate), message))
                return
            if fault.kind is FaultKind.DELAY:
                hold = self._alarm.hold(fault.seconds, fault.gate)
        line.waiting.append((hold, message))
        if _has(faults, FaultKind.DUPLICATE):
            line.waiting.append((None, message))

    def _send_due(self, peer: str) -> None:
        """What nothing holds back; and behind it what it has overtaken. Raises PeerUnreachable."""
        line = self._lines[peer]
        sent = False
        while line.waiting and (line.waiting[0][0] is None or line.waiting[0][0].over):
            self._inner.notify(peer, line.waiting.popleft()[1])
            sent = True
        while line.overtaken and (sent or line.overtaken[0][0].over):
            self._inner.notify(peer, line.overtaken.pop(0)[1])
        if not line.waiting and not line.overtaken:
            del self._lines[peer]

    def receive(self) -> Sequence[Received]:
        self._go_on()
        return [received for received in self._inner.receive() if self._lets_in(received)]

    def _lets_in(self, received: Received) -> bool:
        peer = received.peer
        if self._dice.any_cuts and not self._is_cut(peer):
            for fault in self._faults_of(received.data, FaultKind.CUT):
                self._cut(peer, fault)
        return not self._is_cut(peer)

    def _go_on(self) -> None:
        """With all that was held back and is no more."""
        if self._closed:
            return
        for peer in list(self._lines):
            try:
                self._send_due(peer)
            except PeerUnreachable as error:
                del self._lines[peer]
                self._lost.append(PeerLost(peer, error))
        for write in self._writes:
            write.start_if_due()
        self._writes = [write for write in self._writes if write.state is WriteState.PENDING]

    # ------------------------------------------------------------------ writes

    def open(self, ticket: HandoffTicket, peer: str, block_ids: Sequence[int]) -> None:
        faults = self._dice.roll(OPEN, str(ticket)) if block_ids else []
        if faults:
            self._spoil(self._dice.random.choice(block_ids))
        self._inner.open(ticket, peer, block_ids)

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> Write:
        faults = self._dice.roll(WRITE, str(ticket))
        if self._closed or self._is_cut(peer):
            return _failed()
        if not faults and self._plan.bytes_per_s is None:
            return self._inner.write(peer, ticket, extents)
        write = self._make_write(peer, ticket, extents, faults)
        write.start_if_due()
        self._writes.append(write)
        for fault in faults:
            if fault.kind is FaultKind.CUT:
                self._cut(peer, fault)
        return write

    def _make_write(
        self, peer: str, ticket: HandoffTicket, extents: Extents, faults: list[Fault]
    ) -> FaultyWrite:
        start: Hold | None = None
        ends: list[Hold] = []
        for fault in faults:
            match fault.kind:
                case FaultKind.DELAY:
                    start = self._alarm.hold(fault.seconds, fault.gate)
                case FaultKind.STALL:
                    ends.append(self._alarm.hold(fault.seconds, fault.gate))
                case FaultKind.CORRUPT:
                    extents = self._with_wrong_bytes(extents)
        if self._plan.bytes_per_s is not None:
            ends.append(self._alarm.hold_until(self._over_the_link(extents.num_bytes)))
        return FaultyWrite(lambda: self._begin(peer, ticket, extents), start, ends)

    def _begin(self, peer: str, ticket: HandoffTicket, extents: Extents) -> Write:
        if self._is_cut(peer):  # while it was held back
            return _failed()
        return self._inner.write(peer, ticket, extents)

    def _over_the_link(self, num_bytes: int) -> float:
        """When so much has gone over it, behind all that goes already."""
        assert self._plan.bytes_per_s is not None
        begin = max(time.monotonic(), self._link_free_at)
        self._link_free_at = begin + num_bytes / self._plan.bytes_per_s
        return self._link_free_at

    def _with_wrong_bytes(self, extents: Extents) -> Extents:
        """One of them gets the bytes of the null block, which are no KV."""
        rows = extents.rows.copy()
        rows[self._dice.random.randrange(len(rows)), 0] = 0
        return Extents(rows)

    def _spoil(self, block_id: int) -> None:
        """Fill one of our own blocks with what is no KV."""
        size = self._pool.layout.bytes_per_block
        ctypes.memset(self._pool.address_of(block_id), 0xA5, size)

    def fence(self, ticket: HandoffTicket) -> bool:
        return self._inner.fence(ticket)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """What is still held back is lost, as with a node that dies."""
        self._closed = True
        for write in list(self._writes):
            write.abandon()
        self._alarm.close()
        self._inner.close()
        self._dice.close()


def _has(faults: list[Fault], kind: FaultKind) -> bool:
    return any(fault.kind is kind for fault in faults)


@dataclass(frozen=True)
class _Failed:
    state: WriteState = WriteState.FAILED


def _failed() -> Write:
    return _Failed()
