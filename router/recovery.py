"""Attempts after the first, until one has started or there is no use in it.

an attempt fails ─► pause ─► in line (RetryGate) ─► decide ─► start ── refused ─► pause …
                                  ▲                    └ no node ─► WaitingRoom ─┐
                                  └──────────────────── news of nodes ───────────┘
"""

from __future__ import annotations

import asyncio

from protocol import Failure, KvrelayError, NodeLost, NoHealthyNode, RequestFailed, TransferFailed
from router.attempts import Attempts
from router.config import RouterConfig
from router.flight import Flight
from router.retry_gate import RetryGate
from router.routing import Routing
from router.waiting_room import WaitingRoom


class Recovery:
    """Brings requests back on their way."""

    def __init__(
        self,
        config: RouterConfig,
        routing: Routing,
        attempts: Attempts,
        gate: RetryGate,
        room: WaitingRoom,
    ) -> None:
        self._config = config
        self._routing = routing
        self._attempts = attempts
        self._gate = gate
        self._room = room

    async def recover(self, flight: Flight, failure: Failure) -> None:
        """The flight's attempt has failed, and nobody works on it. Afterwards somebody does.

        Raises:
            KvrelayError: there have been too many attempts, or no node is there to try. It is what
                the client is to see.
        """
        error: KvrelayError = error_of(failure)
        label = failure.label
        while not flight.ended:
            flight.setbacks.note(label, len(flight.log.emitted))
            if flight.setbacks.too_many:
                raise error
            self._attempts.retries[label] += 1
            await asyncio.sleep(flight.setbacks.pause_s())
            try:
                await self._start(flight)
            except NoHealthyNode:
                raise
            except KvrelayError as refused:
                error, label = refused, refused.label
            else:
                return

    async def _start(self, flight: Flight) -> None:
        """The next attempt, as soon as there are nodes for it."""
        until = asyncio.get_running_loop().time() + self._config.recovery_timeout_s
        waited = False
        while not flight.ended:
            try:
                await self._start_now(flight)
            except NoHealthyNode as error:
                self._attempts.retries[error.label] += not waited
                waited = True
                if not await self._room.wait(flight.request_id, self._routing.seen, until):
                    raise
            else:
                return

    async def _start_now(self, flight: Flight) -> None:
        """In its turn. Keeps its place at the gate if the attempt has started."""
        await self._gate.enter(flight.request_id)
        try:
            async with flight.starting:  # all calls of the attempt before have come to an end
                if not flight.ended:
                    await self._attempts.start(flight, self._routing.again(flight))
        except BaseException:
            self._gate.leave(flight.request_id)
            raise
        if flight.ended:
            self._gate.leave(flight.request_id)


def error_of(failure: Failure) -> RequestFailed:
    """What a client sees of the failure of its last attempt."""
    known = {error.label: error for error in (NodeLost, TransferFailed)}
    return known.get(failure.label, RequestFailed)(failure.message)
