"""Which faults of a plan befall what a node does, and a record of those that did."""

from __future__ import annotations

import json
import os
import random

from kv_transfer.transports.fault_plan import Fault, FaultKind, FaultPlan


class _Die:
    """Decides for one fault, on one node. Dice of different faults and nodes are independent."""

    def __init__(self, fault: Fault, seed: str) -> None:
        self.fault = fault
        self._points = fault.points
        self._random = random.Random(seed)
        self._passed = 0
        self._hit = 0

    def hits(self, point: str, ticket: str) -> bool:
        fault = self.fault
        if point not in self._points or not fault.matches(ticket):
            return False
        if fault.times is not None and self._hit >= fault.times:
            return False
        self._passed += 1
        if self._passed <= fault.after or self._random.random() >= fault.probability:
            return False
        self._hit += 1
        return True


class FaultDice:
    """Those of one node. Used from one thread, apart from `close`."""

    def __init__(self, plan: FaultPlan, node: str) -> None:
        self._node = node
        self._dice = [
            _Die(fault, f"{plan.seed}/{node}/{number}")
            for number, fault in enumerate(plan.faults)
            if fault.concerns(node)
        ]
        self.random = random.Random(f"{plan.seed}/{node}")
        self._journal = None
        if plan.journal is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._journal = os.open(plan.journal, flags, 0o600)

        self.any = bool(self._dice)  # whether there is anything that could go wrong
        self.any_cuts = any(die.fault.kind is FaultKind.CUT for die in self._dice)

    def roll(self, point: str, ticket: str, only: FaultKind | None = None) -> list[Fault]:
        """What befalls this occasion, in the order of the plan; or what of one kind does."""
        dice = [die for die in self._dice if only is None or die.fault.kind is only]
        faults = [die.fault for die in dice if die.hits(point, ticket)]
        for fault in faults:
            self._note(fault, point, ticket)
        return faults

    def close(self) -> None:
        if self._journal is not None:
            journal, self._journal = self._journal, None
            os.close(journal)

    def _note(self, fault: Fault, point: str, ticket: str) -> None:
        if self._journal is None:
            return
        entry = {"node": self._node, "kind": fault.kind, "of": point, "ticket": ticket}
        os.write(self._journal, json.dumps(entry).encode() + b"\n")  # whole, also among others
