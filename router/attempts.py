"""One attempt at a request: its jobs go to their nodes at the same time, and are taken back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from protocol import DecodeJob, HandoffTicket, KvrelayError, NodeLost, PrefillJob
from router import orders
from router.background import Background
from router.decision import RoutingDecision
from router.flight import Flight
from router.load import LoadTracker
from router.roster import Member, Roster

Jobs = dict[Member, PrefillJob | DecodeJob]


class Attempts:
    """Starts and ends attempts, and keeps the load that they are."""

    def __init__(
        self,
        roster: Roster,
        load: LoadTracker,
        background: Background,
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._load = load
        self._background = background
        self._clock = clock
        self.retries: Counter[str] = Counter()  # by the label of what failed before

    async def start(self, flight: Flight, decision: RoutingDecision) -> None:
        """Send the jobs. If a node does not take its job, that is raised, and nobody keeps one.

        But a decode node that took its job keeps what it has reserved, for the next attempt.
        """
        ticket = flight.ticket
        flight.timeline.routed = self._clock()
        jobs = self._jobs(flight, decision)
        self._load.sent(ticket, decision.loads)
        left = flight.leave_reservation([m for m, j in jobs.items() if isinstance(j, DecodeJob)])
        flight.begin_attempt({member.node_id: member for member in jobs}, decision.decode_node_id)
        *results, _ = await asyncio.gather(
            *(self._send(flight, member, job) for member, job in jobs.items()),
            asyncio.shield(self._background.spawn(self.cancel(flight.request_id, left))),
            return_exceptions=True,
        )
        refusals = {
            member: result
            for member, result in zip(jobs, results, strict=True)
            if isinstance(result, BaseException)
        }
        over = not flight.listens_to(ticket)  # the nodes were faster than the calls
        if refusals and not over:
            flight.next_attempt()  # at once: what the others say of this one is stale
            for member in jobs.keys() - refusals.keys():
                if isinstance(jobs[member], DecodeJob):
                    flight.keep_reservation(member)
        if refusals or over:
            await self._take_back(flight, ticket, jobs, refusals)
        if refusals and not over:
            raise next(iter(refusals.values()))

    async def _take_back(
        self,
        flight: Flight,
        ticket: HandoffTicket,
        jobs: Iterable[Member],
        refusals: Mapping[Member, BaseException],
    ) -> None:
        """Nobody is to go on with these jobs. Also where the end came before the job."""
        self._load.ended(ticket)
        silent = {member for member, error in refusals.items() if isinstance(error, NodeLost)}
        for member in silent:
            self.cancel_later([flight.request_id], member)
        if flight.reserved_at in silent:
            flight.reserved_at = None
        spared = {flight.reserved_at, *silent}
        await self.cancel(flight.request_id, [m for m in jobs if m not in spared])

    async def leave(self, flight: Flight) -> None:
        """The request is over on all nodes."""
        self._load.ended(flight.ticket)
        members = flight.take_open() + flight.leave_reservation()
        await self.cancel(flight.request_id, members)

    async def cancel(self, request_id: str, members: Iterable[Member]) -> None:
        """A node that does not answer notices by itself that nobody listens."""
        talking = []
        for member in members:
            if member.silent:
                self.cancel_later([request_id], member)
            else:
                talking.append(member)
        await asyncio.gather(*(self._cancel_at(member, request_id) for member in talking))

    def cancel_later(self, request_ids: Iterable[str], member: Member) -> None:
        """At a node that is not likely to answer, but might still do something when it wakes."""
        for request_id in request_ids:
            self._background.spawn(self._cancel_at(member, request_id))

    async def _cancel_at(self, member: Member, request_id: str) -> None:
        await orders.ask(member, f"the end of {request_id}", member.node.cancel(request_id))

    def _jobs(self, flight: Flight, decision: RoutingDecision) -> Jobs:
        """What each node of the decision is to do."""
        request, emitted = flight.request, tuple(flight.log.emitted)
        decode = self._member(decision.decode_node_id)
        prefill = (
            None if decision.prefill_node_id is None else self._member(decision.prefill_node_id)
        )
        # The first token may be all there is; then no decode node is bothered.
        decodes = prefill is None or request.sampling.max_tokens - len(emitted) > 1
        jobs: Jobs = {}
        if prefill is not None:
            jobs[prefill] = PrefillJob(
                request=request,
                caller=prefill.caller,
                attempt=flight.attempt,
                emitted=emitted,
                decode_endpoint=decode.info.endpoint if decodes else None,
            )
        if decodes:
            jobs[decode] = DecodeJob(
                request=request,
                caller=decode.caller,
                attempt=flight.attempt,
                emitted=emitted,
                prefill_endpoint=None if prefill is None else prefill.info.endpoint,
            )
        return jobs

    def _member(self, node_id: str) -> Member:
        member = self._roster.get(node_id)
        assert member is not None, f"{node_id} was chosen, but is not connected"
        return member

    async def _send(self, flight: Flight, member: Member, job: PrefillJob | DecodeJob) -> None:
        ticket = flight.ticket
        try:
            async with asyncio.timeout(orders.CALL_TIMEOUT_S):
                await member.send(job)
        except TimeoutError:
            flight.failed_nodes.add(member.node_id)
            raise NodeLost(
                f"node {member.node_id} did not answer within {orders.CALL_TIMEOUT_S:g} s"
            ) from None
        except KvrelayError:
            flight.failed_nodes.add(member.node_id)
            raise
        self._load.taken(ticket, member.node_id)
