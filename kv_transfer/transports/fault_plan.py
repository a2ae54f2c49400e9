"""What is to go wrong on its way from one node to another: for tests, and for experiments.

A plan is the same for all nodes of a cluster. Each fault says which occasions it may befall: what
moves (`of`), where (`node`), of which hand-off (`ticket`). Of those the first `after` pass, and
then at most `times` are hit, each with `probability`. The same seed gives the same dice.
"""

from __future__ import annotations

import enum
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from protocol import ConfigError

WRITE = "write"
OPEN = "open"
FROM_PREFILL = frozenset({"started", "pushing", "heartbeat", "commit", "closed", "revoked"})
FROM_DECODE = frozenset({"destination", "arrived", "cancel", "revoke"})
MESSAGES = FROM_PREFILL | FROM_DECODE


class FaultKind(enum.StrEnum):
    """What can happen to a message, to a write, or to blocks that are opened for a peer.

    What is held back (`delay`, `stall`, `cut`) is so for `seconds`, or until `gate` opens, or, with
    neither of them, for ever.
    """

    DELAY = (
        "delay"  # a message leaves later, and what follows waits behind it; a write starts later
    )
    DROP = "drop"  # a message is lost
    DUPLICATE = "duplicate"  # a message comes twice
    REORDER = (
        "reorder"  # a message is overtaken by the next to its peer, if one comes within `seconds`
    )
    CORRUPT = "corrupt"  # wrong bytes are in one block: after a write, or from before the first one
    STALL = "stall"  # a write does its work, but does not end
    CUT = "cut"  # the peer cannot be reached: from when this was sent or started, or has come


_MAY_BEFALL: dict[FaultKind, frozenset[str]] = {
    FaultKind.DELAY: MESSAGES | {WRITE},
    FaultKind.DROP: MESSAGES,
    FaultKind.DUPLICATE: MESSAGES,
    FaultKind.REORDER: MESSAGES,
    FaultKind.CORRUPT: frozenset({WRITE, OPEN}),
    FaultKind.STALL: frozenset({WRITE}),
    FaultKind.CUT: MESSAGES | {WRITE},
}
_UNLESS_SAID = {FaultKind.CORRUPT: frozenset({WRITE})}
_DEFAULT_REORDER_S = 0.05


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that goes wrong.

    Raises:
        ConfigError: it cannot befall what it is to befall, or a number is out of its range.
    """

    kind: FaultKind
    of: tuple[str, ...] = ()  # messages by their names on the wire, "write", "open"; (): all it may
    node: str = "*"  # where it is sent, written, opened, or (cut) taken in; a pattern of node ids
    ticket: str = "*"  # a pattern of `request/attempt`
    probability: float = 1.0
    after: int = 0
    times: int | None = None  # None: no limit
    seconds: float | None = None
    gate: str | None = None  # path of a FIFO; open once it is gone, or its last writer is

    def __post_init__(self) -> None:
        possible = _MAY_BEFALL[self.kind]
        for point in self.of:
            if point not in possible:
                names = ", ".join(sorted(possible))
                raise ConfigError("of", f"{self.kind} can befall {names}, not {point!r}")
        if not 0 <= self.probability <= 1:
            raise ConfigError("probability", f"must be from 0 to 1, not {self.probability}")
        for name in ("after", "times", "seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(name, f"must be at least 0, not {value}")

    @property
    def points(self) -> frozenset[str]:
        """All that it may befall."""
        return frozenset(self.of) or _UNLESS_SAID.get(self.kind, _MAY_BEFALL[self.kind])

    @property
    def hold_s(self) -> float | None:
        """For how long something is held back, if its gate does not say."""
        if self.seconds is None and self.kind is FaultKind.REORDER:
            return _DEFAULT_REORDER_S
        return self.seconds

    def concerns(self, node: str) -> bool:
        return fnmatchcase(node, self.node)

    def matches(self, ticket: str) -> bool:
        return self.ticket == "*" or fnmatchcase(ticket, self.ticket)


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that goes wrong in one cluster. The default is nothing.

    Raises:
        ConfigError: the link has no speed.
    """

    seed: int = 0
    faults: tuple[Fault, ...] = ()
    bytes_per_s: float | None = None  # of each node's link; a write ends no sooner than it would
    journal: str | None = None  # a file that gets a line of JSON for everything that went wrong

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ConfigError("bytes_per_s", f"must be above 0, not {self.bytes_per_s}")

    @classmethod
    def parse(cls, values: dict[str, Any]) -> FaultPlan:
        """From what stands in a file. Raises ConfigError."""
        try:
            return msgspec.convert(values, cls)
        except (msgspec.ValidationError, ConfigError) as error:
            raise ConfigError("faults", str(error)) from error
