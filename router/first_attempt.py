"""A request finds its first nodes.

A node that does not take its job (it drains, or has just died) is no reason to fail while another
one might. If there is none, the request waits for one, as long as `admission_wait_s`.
"""

from __future__ import annotations

import asyncio

from protocol import GenerationRequest, NodeLost, NoHealthyNode, Overloaded
from router.admission import Admission
from router.attempts import Attempts
from router.decision import RoutingDecision
from router.flight import Flight
from router.routing import Routing
from router.waiting_room import WaitingRoom


class FirstAttempt:
    """Of any request. `until` is of the event loop's clock."""

    def __init__(
        self, routing: Routing, attempts: Attempts, admission: Admission, room: WaitingRoom
    ) -> None:
        self._routing = routing
        self._attempts = attempts
        self._admission = admission
        self._room = room
        self._num_waiting = 0

    async def decide(
        self,
        request: GenerationRequest,
        until: float,
        siblings_at: frozenset[str] = frozenset(),
    ) -> RoutingDecision:
        """Raises NoHealthyNode, PromptTooLong, or Overloaded: too many wait for a node."""
        while True:
            try:
                return self._routing.first(request, siblings_at=siblings_at)
            except NoHealthyNode:
                if not await self._wait_for_nodes(request, until):
                    raise

    async def start(self, flight: Flight, decision: RoutingDecision, until: float) -> None:
        """Raises what the last node said that did not take its job."""
        while (refused := await self._try(flight, decision)) is not None:
            decision = await self._decide_elsewhere(flight, refused, until)
            self._attempts.retries[refused.label] += 1

    async def _try(self, flight: Flight, decision: RoutingDecision) -> Overloaded | NodeLost | None:
        """The refusal, if another node might take what this one did not."""
        try:
            async with flight.starting:
                if not flight.ended:
                    await self._attempts.start(flight, decision)
        except (Overloaded, NodeLost) as refused:
            return refused
        return None

    async def _decide_elsewhere(
        self, flight: Flight, refused: Overloaded | NodeLost, until: float
    ) -> RoutingDecision:
        avoid = frozenset(flight.failed_nodes)
        while True:
            try:
                return self._routing.first(flight.request, avoid)
            except NoHealthyNode:
                if not await self._wait_for_nodes(flight.request, until):
                    raise refused from None
                avoid = frozenset()  # whoever refused may take it now

    async def _wait_for_nodes(self, request: GenerationRequest, until: float) -> bool:
        """Whether there is something new. Raises Overloaded: too many wait or are under way."""
        if until <= asyncio.get_running_loop().time():
            return False
        self._admission.check_waiting(self._num_waiting)
        self._num_waiting += 1
        try:
            return await self._room.wait(request.request_id, self._routing.seen, until)
        finally:
            self._num_waiting -= 1
