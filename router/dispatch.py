"""Sends requests to nodes, and is the one owner of their token logs.

    submit ─► policy ─► admission ─► PrefillJob to P and DecodeJob to D, at the same time
                                        deltas of both ─► Flight ─► client
    an attempt fails ─► the next one, elsewhere, with prompt + emitted tokens
    the client leaves ─► cancel on all nodes

Lives in one event loop; nothing here waits for a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import TypeVar

from directory import Directory
from protocol import (
    ClusterStatus,
    DecodeJob,
    DecodeNode,
    Delta,
    Failure,
    GenerationRequest,
    KvrelayError,
    Node,
    NodeLost,
    NodeReport,
    NoHealthyNode,
    PauseMode,
    PrefillJob,
    PrefillNode,
    RequestFailed,
    TokenStream,
    TransferFailed,
)
from router.admission import Admission
from router.cluster_view import ClusterView
from router.config import RouterConfig
from router.decision import RoutingDecision
from router.facts import RequestFacts
from router.flight import Flight
from router.policies import get_policy

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_CALL_TIMEOUT_S = 10.0  # a node takes a job, or says no, within this
_STATUS_TIMEOUT_S = 2.0  # whoever asks for the health of the cluster does not wait for long


class Dispatcher:
    """The `Backend` of a gateway: routes requests over the nodes that it is given."""

    def __init__(
        self,
        directory: Directory,
        fingerprint: str,
        prefill_nodes: Iterable[PrefillNode],
        decode_nodes: Iterable[DecodeNode],
        config: RouterConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config or RouterConfig()
        self._policy = get_policy(self._config.policy)
        self._cluster = ClusterView(directory, fingerprint, self._config)
        self._admission = Admission(self._config)
        self._clock = clock
        self._caller = f"router-{uuid.uuid4().hex[:12]}"
        self._prefill_nodes = {node.info.node_id: node for node in prefill_nodes}
        self._decode_nodes = {node.info.node_id: node for node in decode_nodes}
        self._flights: dict[str, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost_nodes: set[str] = set()  # nothing that they do would be heard
        self._snapshots_under_way: set[str] = set()
        self._decisions: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    @property
    def _nodes(self) -> Mapping[str, Node]:
        return {**self._prefill_nodes, **self._decode_nodes}

    async def start(self) -> None:
        """Listen to all nodes, and learn what they have cached."""
        for node_id, node in self._nodes.items():
            self._spawn(self._listen(node_id, node))
        self._cluster.refresh()
        self._ask_snapshots()

    async def stop(self) -> None:
        """Abort what is under way and stop listening."""
        await asyncio.gather(*map(self._abandon, self._flights.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._cluster.close()

    # ------------------------------------------------------------------ Backend

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Admit the request and start its first attempt.

        Raises:
            PromptTooLong: no node could ever hold it.
            Overloaded: too much is queued already.
            NoHealthyNode: there is none for a role that is needed.
        """
        try:
            avoid = frozenset(self._lost_nodes)
            decision = self._decide(self._cluster.facts(request, avoid=avoid))
            flight = self._admit(request, decision)
            await self._start_first(flight, decision)
        except KvrelayError as error:
            self._rejected[error.label] += 1
            raise
        return flight

    async def _start_first(self, flight: Flight, decision: RoutingDecision) -> None:
        started = False
        try:
            async with flight.starting:
                await self._start_attempt(flight, decision)
            started = True
        finally:
            if not started:  # refused by a node, or our caller was cancelled
                flight.abort()  # whatever nodes still say of it is stale
                self._spawn(self._end(flight))

    async def status(self) -> ClusterStatus:
        reports = await asyncio.gather(*map(self._report, self._nodes.values()))
        return ClusterStatus(
            nodes=tuple(reports),
            num_requests=len(self._flights),
            decisions=dict(self._decisions),
            retries=dict(self._retries),
            rejected=dict(self._rejected),
        )

    async def _report(self, node: Node) -> NodeReport:
        """Without its status if it does not answer: it has died, or is stopped, or very busy."""
        status = await self._ask(node, "its status", node.status(), timeout_s=_STATUS_TIMEOUT_S)
        return NodeReport(node.info, status)

    async def pause(self, mode: PauseMode) -> dict[str, bool]:
        """Pause all nodes; whether each of them is paused now."""
        return await self._tell_all("a pause", lambda node: node.pause(mode))

    async def resume(self) -> dict[str, bool]:
        """Let all nodes go on; whether each of them does."""
        return await self._tell_all("going on", lambda node: node.resume())

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> dict[str, bool]:
        """Forget what can be hit on all nodes; whether each of them has."""
        return await self._tell_all(
            "a reset",
            lambda node: node.reset_prefix_cache(reset_running_requests=reset_running_requests),
        )

    async def _tell_all(
        self, what: str, tell: Callable[[Node], Awaitable[bool | None]]
    ) -> dict[str, bool]:
        """By node id: whether the node has done it. One that only returns has."""

        async def carried_out(node: Node) -> bool:
            return await tell(node) is not False

        nodes = self._nodes
        asked = (self._ask(node, what, carried_out(node)) for node in nodes.values())
        answers = await asyncio.gather(*asked)
        return {node_id: bool(done) for node_id, done in zip(nodes, answers, strict=True)}

    async def _ask(
        self,
        node: Node,
        what: str,
        answer: Awaitable[AnswerT],
        timeout_s: float | None = None,
    ) -> AnswerT | None:
        """None, and a warning, if the node is lost or takes too long."""
        timeout_s = timeout_s or _CALL_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s"
        except KvrelayError as error:
            problem = str(error)
        is_news = node.info.node_id not in self._lost_nodes
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "%s was asked for %s: %s", node.info.node_id, what, problem)
        return None

    # ------------------------------------------------------------------ an attempt

    def _decide(self, facts: RequestFacts) -> RoutingDecision:
        decision = self._policy(facts, self._cluster.look())
        self._ask_snapshots()
        self._decisions[decision.kind] += 1
        logger.debug("%s", decision.explain())
        return decision

    def _admit(self, request: GenerationRequest, decision: RoutingDecision) -> Flight:
        lease = self._admission.admit(
            len(request.prompt_token_ids), predicted_ttft_s=decision.predicted_ttft_s
        )
        flight = Flight(request, lease, self._abandon, self._config.stall_timeout_s)
        flight.timeline.admitted = self._clock()
        assert request.request_id not in self._flights, f"{request.request_id} is used twice"
        self._flights[request.request_id] = flight
        return flight

    async def _start_attempt(self, flight: Flight, decision: RoutingDecision) -> None:
        """Send the jobs. If a node does not take its job, nobody keeps one, and that is raised."""
        ticket = flight.ticket
        flight.timeline.routed = self._clock()
        self._cluster.load.sent(ticket, decision.loads)
        calls = self._job_calls(flight, decision)
        flight.nodes, flight.open_nodes = frozenset(calls), set(calls)
        results = await asyncio.gather(
            *(self._send(flight, node_id, call) for node_id, call in calls.items()),
            return_exceptions=True,
        )
        errors = [error for error in results if isinstance(error, BaseException)]
        over = not flight.listens_to(ticket)  # the nodes were faster than the calls
        if not errors and not over:
            return
        if not over:
            flight.next_attempt()  # at once: what the others say of this one is stale
        self._cluster.load.ended(ticket)
        await self._cancel(flight.request_id, calls)  # also where it came before the job
        if not over:
            raise errors[0]

    def _job_calls(
        self, flight: Flight, decision: RoutingDecision
    ) -> dict[str, Callable[[], Awaitable[None]]]:
        """What to call on each node of the decision."""
        request, emitted = flight.request, tuple(flight.log.emitted)
        decode = self._decode_nodes[decision.decode_node_id]
        prefill = (
            None
            if decision.prefill_node_id is None
            else self._prefill_nodes[decision.prefill_node_id]
        )
        # The first token may be all there is; then no decode node is bothered.
        decodes = prefill is None or request.sampling.max_tokens - len(emitted) > 1
        calls: dict[str, Callable[[], Awaitable[None]]] = {}
        if prefill is not None:
            prefill_job = PrefillJob(
                request=request,
                caller=self._caller,
                attempt=flight.attempt,
                emitted=emitted,
                decode_endpoint=decode.info.endpoint if decodes else None,
            )
            calls[prefill.info.node_id] = lambda: prefill.prefill(prefill_job)
        if decodes:
            decode_job = DecodeJob(
                request=request,
                caller=self._caller,
                attempt=flight.attempt,
                emitted=emitted,
                prefill_endpoint=None if prefill is None else prefill.info.endpoint,
            )
            calls[decode.info.node_id] = lambda: decode.decode(decode_job)
        return calls

    async def _send(
        self, flight: Flight, node_id: str, call: Callable[[], Awaitable[None]]
    ) -> None:
        ticket = flight.ticket
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await call()
        except TimeoutError:
            flight.failed_nodes.add(node_id)
            raise NodeLost(f"node {node_id} did not answer within {_CALL_TIMEOUT_S:g} s") from None
        except KvrelayError:
            flight.failed_nodes.add(node_id)
            raise
        self._cluster.load.taken(ticket, node_id)

    async def _retry(self, flight: Flight, failure: Failure) -> None:
        """Attempts after the first, until one has started or there have been too many."""
        error: KvrelayError = _error_of(failure)
        label = failure.label
        while flight.attempt < self._config.max_attempts:
            self._retries[label] += 1
            await asyncio.sleep(self._config.retry_backoff_s * 2 ** (flight.attempt - 1))
            try:
                await self._start_again(flight)
            except KvrelayError as refused:
                error, label = refused, refused.label
                continue
            return
        flight.fail(error)
        await self._end(flight)

    async def _start_again(self, flight: Flight) -> None:
        """The next attempt. If this raises, it has failed, and the one behind it is due."""
        async with flight.starting:  # all calls of the attempt before have come to an end
            if flight.ended:
                return
            try:
                decision = self._decide_again(flight)
            except KvrelayError:
                flight.next_attempt()
                raise
            await self._start_attempt(flight, decision)

    async def _retry_after(self, flight: Flight, failure: Failure, nodes: set[str]) -> None:
        await self._cancel(flight.request_id, nodes)
        await self._retry(flight, failure)

    async def _leave_nodes(self, flight: Flight) -> None:
        """The current attempt is over on all nodes."""
        self._cluster.load.ended(flight.ticket)
        nodes, flight.open_nodes = flight.open_nodes, set()
        await self._cancel(flight.request_id, nodes)

    def _decide_again(self, flight: Flight) -> RoutingDecision:
        """Elsewhere if possible; if not, at least with another prefill node."""
        request, emitted = flight.request, flight.log.emitted
        lost, failed = frozenset(self._lost_nodes), frozenset(flight.failed_nodes)
        for avoid in (failed, failed & self._prefill_nodes.keys()):
            with contextlib.suppress(NoHealthyNode):
                return self._decide(self._cluster.facts(request, emitted, lost | avoid))
        return self._decide(self._cluster.facts(request, emitted, lost))

    async def _abandon(self, flight: Flight) -> None:
        """The client wants no more of it. Nodes hear of that even if the client cannot wait."""
        flight.abort()
        await asyncio.wait([self._spawn(self._end(flight))])

    async def _end(self, flight: Flight) -> None:
        """Free everything that the flight holds, here and on nodes. Harmless when repeated."""
        if self._flights.pop(flight.request_id, None) is None:
            return
        flight.lease.release()
        flight.timeline.finished = flight.timeline.finished or self._clock()
        await self._leave_nodes(flight)

    async def _cancel(self, request_id: str, node_ids: Iterable[str]) -> None:
        """A node that does not answer notices by itself that nobody listens."""
        nodes = [self._nodes[node_id] for node_id in node_ids]
        what = f"the end of {request_id}"
        await asyncio.gather(*(self._ask(node, what, node.cancel(request_id)) for node in nodes))

    # ------------------------------------------------------------------ what nodes say

    async def _listen(self, node_id: str, node: Node) -> None:
        async for batch in node.outputs(self._caller):
            for delta in batch.deltas:
                self._take(node_id, delta)
        logger.warning("node %s is lost", node_id)
        self._lost_nodes.add(node_id)
        lost = Failure(NodeLost.label, f"node {node_id} stopped", retryable=True)
        for flight in [f for f in self._flights.values() if node_id in f.open_nodes]:
            self._fail_attempt(flight, node_id, lost)

    def _take(self, node_id: str, delta: Delta) -> None:
        flight = self._flights.get(delta.request_id)
        if flight is None or delta.attempt != flight.attempt or flight.ended:
            return  # stale
        if delta.failure is not None:
            flight.open_nodes.discard(node_id)
            self._fail_attempt(flight, node_id, delta.failure)
            return
        if delta.handed_off or delta.finish_reason is not None:
            flight.open_nodes.discard(node_id)
        self._note_tokens(flight, delta)
        if flight.take(delta):
            flight.timeline.finished = self._clock()
            self._spawn(self._end(flight))

    def _note_tokens(self, flight: Flight, delta: Delta) -> None:
        if not delta.token_ids:
            return
        now = self._clock()
        if flight.timeline.first_token is None:
            flight.timeline.first_token = now
            flight.lease.first_token()
        self._cluster.load.first_token(flight.ticket)
        flight.timeline.last_token = now

    def _fail_attempt(self, flight: Flight, node_id: str, failure: Failure) -> None:
        logger.info("attempt %s failed on %s: %s", flight.ticket, node_id, failure.message)
        lost_prefill = failure.label == NodeLost.label and node_id in self._prefill_nodes
        if lost_prefill and self._config.decode_recomputes and flight.open_nodes - {node_id}:
            flight.open_nodes.discard(node_id)
            return
        flight.failed_nodes.add(node_id)
        if failure.label == TransferFailed.label:
            # Whoever noticed it, what failed is between the two: the next attempt takes another P.
            flight.failed_nodes |= flight.nodes & self._prefill_nodes.keys()
        if failure.retryable:
            self._cluster.load.ended(flight.ticket)
            nodes = flight.open_nodes - {node_id}
            flight.next_attempt()  # at once: what the old attempt says from now on is stale
            self._spawn(self._retry_after(flight, failure, nodes))
        else:
            flight.fail(_error_of(failure))
            self._spawn(self._end(flight))

    # ------------------------------------------------------------------ in the background

    def _ask_snapshots(self) -> None:
        for node_id in self._cluster.index.needs_snapshot() - self._snapshots_under_way:
            if node_id in self._nodes:
                self._snapshots_under_way.add(node_id)
                self._spawn(self._take_snapshot(node_id))

    async def _take_snapshot(self, node_id: str) -> None:
        try:
            snapshot = await self._nodes[node_id].snapshot()
        except (TimeoutError, KvrelayError) as error:
            logger.warning("no cache snapshot of %s: %r", node_id, error)
        else:
            self._cluster.index.apply_snapshot(snapshot)
        finally:
            self._snapshots_under_way.discard(node_id)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task failed", exc_info=task.exception())


def _error_of(failure: Failure) -> RequestFailed:
    """What a client sees of the failure of its last attempt."""
    known = {error.label: error for error in (NodeLost, TransferFailed)}
    return known.get(failure.label, RequestFailed)(failure.message)
