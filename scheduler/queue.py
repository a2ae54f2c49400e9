"""The order in which waiting requests are looked at."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from scheduler.config import Policy
from scheduler.request import Request


class RequestQueue(Protocol):
    """Waiting requests in the order of a policy."""

    def add(self, request: Request) -> None:
        """A new request takes its place."""

    def put_back(self, requests: Iterable[Request]) -> None:
        """Requests that were taken out go in front again, in the order given."""

    def peek(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be taken out."""


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        self._requests.extendleft(reversed(list(requests)))

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue:
    """The smallest (priority, arrival time, id) first, however long it has waited."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.urgency, request))

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[1] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap))


def make_queue(policy: Policy) -> RequestQueue:
    """An empty queue that orders by `policy`."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()
