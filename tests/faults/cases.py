"""States of a hand-off, faults, and how a plan brings the one about and the other upon it.

    state       how it is held                                 where it shows
    reserving   P's start is held back                         D: reserving
    ready       D's destination is held back                   D: ready
    pushing     P's writes are held back                       P and D: pushing
    committed   P's commit is held back                        P has committed, D: pushing
    aborted     as pushing; then the client leaves             P: aborted; D: aborted or, with
    expired     as pushing; P's heartbeats are lost            D: expired          memory, gone
    failed      as pushing; that cuts D off from P             D: failed

Only the first attempt at the request of a case is touched, which its plan knows by its name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from kv_transfer import Fault, FaultKind

_P, _D = "prefill-*", "decode-*"


class State(enum.StrEnum):
    RESERVING = "reserving"
    READY = "ready"
    PUSHING = "pushing"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"


class Harm(enum.StrEnum):
    P_KILLED = "p_killed"
    D_KILLED = "d_killed"
    P_STOPPED = "p_stopped"
    LOST = "lost"
    DOUBLED = "doubled"
    CORRUPTED = "corrupted"
    CLIENT_GONE = "client_gone"
    DEADLINE = "deadline"


UNHAPPY = frozenset({State.ABORTED, State.EXPIRED, State.FAILED})

# What has to come for the hand-off to leave the state, or for its blocks to be safe afterwards.
# P that does not know that D has failed commits, which is as good as to say that it has closed.
_MESSAGES: dict[State, tuple[str, tuple[str, ...]]] = {
    State.RESERVING: (_P, ("started",)),
    State.READY: (_D, ("destination",)),
    State.PUSHING: (_P, ("pushing",)),
    State.COMMITTED: (_P, ("commit",)),
    State.ABORTED: (_P, ("closed",)),
    State.EXPIRED: (_D, ("cancel",)),
    State.FAILED: (_P, ("closed", "commit")),
}


@dataclass(frozen=True)
class Case:
    state: State
    harm: Harm

    def __str__(self) -> str:
        return f"{self.state}.{self.harm}"

    @property
    def holds(self) -> bool:
        """Whether the state is held until the test has seen it; else the plan does all."""
        by_plan = self.harm in (Harm.LOST, Harm.DOUBLED)
        if self.harm is Harm.CORRUPTED:
            by_plan = self.state in (State.READY, State.PUSHING)
        return self.state in UNHAPPY or not by_plan

    def gate(self, directory: Path) -> Path:
        return directory / f"{self}.gate"

    def faults(self, directory: Path) -> list[Fault]:
        hold = self._hold(str(self.gate(directory))) if self.holds else []
        return [*self._harm(), *hold]

    def _hold(self, gate: str) -> list[Fault]:
        match self.state:
            case State.RESERVING:
                return [self._fault(FaultKind.DELAY, _P, "started", gate=gate)]
            case State.READY:
                return [self._fault(FaultKind.DELAY, _D, "destination", gate=gate)]
            case State.COMMITTED:
                return [self._fault(FaultKind.DELAY, _P, "commit", gate=gate)]
        faults = [self._fault(FaultKind.DELAY, _P, "write", gate=gate)]
        if self.state is State.EXPIRED:
            faults.append(self._fault(FaultKind.DROP, _P, "heartbeat"))
        if self.state is State.FAILED:
            faults.append(self._fault(FaultKind.CUT, _D, "pushing", gate=gate, times=1))
        return faults

    def _harm(self) -> list[Fault]:
        """What the plan does to it; all else is done by the test."""
        node, messages = _MESSAGES[self.state]
        match self.harm:
            case Harm.LOST:
                return [self._fault(FaultKind.DROP, node, *messages, times=1)]
            case Harm.DOUBLED:
                return [self._fault(FaultKind.DUPLICATE, node, *messages)]
            case Harm.CORRUPTED if self.state is State.READY:
                # Nothing has been written: D's block holds something wrong before.
                return [self._fault(FaultKind.CORRUPT, _D, "open")]
            case Harm.CORRUPTED:
                # Of `reserving`, the first block that is written once it is left.
                return [self._fault(FaultKind.CORRUPT, _P, "write", times=1)]
        return []

    def _fault(
        self,
        kind: FaultKind,
        node: str,
        *of: str,
        gate: str | None = None,
        times: int | None = None,
    ) -> Fault:
        return Fault(kind=kind, node=node, of=of, ticket=f"{self}/0", gate=gate, times=times)


ALL = [Case(state, harm) for state in State for harm in Harm]
