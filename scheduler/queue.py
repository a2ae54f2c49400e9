"""The order in which waiting requests are looked at, and who need not be looked at.

    waiting          requests as they come, and preempted ones
    skipped_waiting  requests that were passed over for a reason of their own

A step never goes through a queue: adding, taking out of the middle, and finding the next request
that could be admitted cost O(log n) comparisons at most, however many others wait.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from scheduler.config import Policy
from scheduler.request import Request, Urgency


class Wait(enum.StrEnum):
    """What a waiting request waits for."""

    # Nobody behind a request that waits for one of these is admitted.
    SEAT = "seat"  # max_num_seqs
    TOKENS = "tokens"  # the step's budget is used up, or too small for a prompt that is not cut
    BLOCKS = "blocks"  # the KV cache is full
    PREEMPTION = "preemption"  # nobody is admitted in a step that preempts
    PAUSE = "pause"

    # One that waits for one of these is passed over: it goes to `skipped_waiting`.
    REMOTE_KVS = "remote KV"  # its load is under way
    CONNECTOR = "connector"  # which did not know yet
    ASKED = "asked"  # the same, and it was asked in this step
    PARKING = "parking"  # max_parked_blocks
    LORA = "LoRA"  # max_loras
    GRAMMAR = "grammar"  # still compiling
    PARTIAL_PREFILL = "partial prefill"  # max_num_partial_prefills
    LONG_PREFILL = "long prefill"  # max_long_partial_prefills
    TURN = "turn"  # what it waited for has come

    @property
    def ends_admission(self) -> bool:
        return self in _ENDS_ADMISSION


_ENDS_ADMISSION = frozenset({Wait.SEAT, Wait.TOKENS, Wait.BLOCKS, Wait.PREEMPTION, Wait.PAUSE})


class RequestQueue(Protocol):
    """Waiting requests in the order of a policy."""

    def add(self, request: Request) -> None:
        """A new request takes its place."""

    def put_back(self, request: Request) -> None:
        """A request that was taken out goes in front again."""

    def peek(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, request: Request) -> bool: ...
    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be taken out."""


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request] = None

    def put_back(self, request: Request) -> None:
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests))

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue:
    """The smallest (priority, arrival time, id) first, however long it has waited."""

    def __init__(self) -> None:
        self._sorted: list[tuple[Urgency, Request]] = []
        self._members: set[Request] = set()

    def add(self, request: Request) -> None:
        self._members.add(request)
        insort(self._sorted, (request.urgency, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._sorted[0][1]

    def remove(self, request: Request) -> None:
        self._members.remove(request)
        del self._sorted[bisect_left(self._sorted, (request.urgency,))]

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._sorted)


def make_queue(policy: Policy) -> RequestQueue:
    """An empty queue that orders by `policy`."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()


_Key = tuple[float | str, ...]


@dataclass(frozen=True)
class _Place:
    wait: Wait
    group: Hashable
    key: _Key


class SkippedQueue:
    """Requests that were passed over, by what they wait for.

    A request keeps its place among the skipped ones until it is admitted: under fcfs they stand in
    the order in which they were first passed over. Requests that wait for the same thing form a
    group, so that a step looks at none of those that cannot go on:

        REMOTE_KVS, GRAMMAR          not looked at until what they wait for has come (TURN)
        LORA (one group each)        not looked at while no more adapters fit into the step
        PARKING, PARTIAL_PREFILL …   not looked at in this step once one of the group was refused
        CONNECTOR                    asked once in each step
    """

    def __init__(self, policy: Policy) -> None:
        self._by_urgency = policy == "priority"
        self._numbers = itertools.count()
        self._places: dict[Request, _Place] = {}
        self._groups: dict[Hashable, list[tuple[_Key, Request]]] = {}

    def put(self, request: Request, wait: Wait) -> None:
        """Pass the request over, or note that it waits for something else now."""
        place = self._places.get(request)
        if place is not None:
            self.remove(request)
            key = place.key
        else:
            key = request.urgency if self._by_urgency else (next(self._numbers),)
        group = (wait, request.lora_name) if wait is Wait.LORA else wait
        self._places[request] = _Place(wait, group, key)
        insort(self._groups.setdefault(group, []), (key, request))

    def remove(self, request: Request) -> None:
        place = self._places.pop(request)
        group = self._groups[place.group]
        del group[bisect_left(group, (place.key,))]
        if not group:
            del self._groups[place.group]

    def first(self, is_open: Callable[[Wait, str | None], bool]) -> Request | None:
        """The first request of those groups whose wait (and adapter, for LORA) is open."""
        heads = [group[0] for group in self._groups.values() if self._is_open(group, is_open)]
        return min(heads)[1] if heads else None

    def _is_open(
        self, group: list[tuple[_Key, Request]], is_open: Callable[[Wait, str | None], bool]
    ) -> bool:
        head = group[0][1]
        return is_open(self._places[head].wait, head.lora_name)

    def waits_for(self, request: Request) -> Wait:
        return self._places[request].wait

    def waiting_for(self, wait: Wait) -> list[Request]:
        """In their order. Not for a wait that has several groups."""
        return [request for _, request in self._groups.get(wait, ())]

    def in_order(self, requests: Iterable[Request]) -> list[Request]:
        """Some of the skipped ones, in their order."""
        return sorted(requests, key=lambda request: self._places[request].key)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: Request) -> bool:
        return request in self._places

    def __iter__(self) -> Iterator[Request]:
        """In their order, whatever they wait for."""
        return (request for _, request in heapq.merge(*self._groups.values()))
