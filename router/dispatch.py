"""Sends requests to nodes, and is the one owner of their token logs.

    submit ─► policy ─► admission ─► PrefillJob to P and DecodeJob to D, at the same time
                                        deltas of both ─► Flight ─► client
    an attempt fails ─► the next one, elsewhere, with prompt + emitted tokens   (recovery.py)
    nodes come and go                                                           (roster.py)
    the client leaves ─► cancel on all nodes

Lives in one event loop; nothing here waits for a model.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable

from directory import Directory
from protocol import (
    HASH_BLOCK_SIZE,
    ClusterStatus,
    DecodeNode,
    Delta,
    Failure,
    GenerationRequest,
    KvrelayError,
    NodeLost,
    PauseMode,
    PrefillNode,
    Role,
    TokenStream,
)
from router.admission import Admission
from router.attempts import Attempts
from router.background import Background
from router.cluster_view import ClusterView
from router.config import RouterConfig
from router.decision import RoutingDecision
from router.first_attempt import FirstAttempt
from router.flight import Flight
from router.orders import Orders
from router.policies import get_policy
from router.recovery import Recovery, error_of
from router.retry_gate import RetryGate
from router.roster import Member, Roster
from router.routing import Routing, state_of
from router.setbacks import Setbacks
from router.snapshots import Snapshots
from router.view import NodeView
from router.waiting_room import WaitingRoom

logger = logging.getLogger(__name__)

# Nobody tells that a node is not heard of any more, nor, with a directory elsewhere, that one is
# well again. It is a small part of how long people wait for a restart, and costs next to nothing.
_LOOK_S = 0.2


class Dispatcher:
    """The `Backend` of a gateway: routes requests over the nodes that it is given.

    A node takes part while it is connected (`add_node`) and the directory has a record of the
    same generation.
    """

    def __init__(
        self,
        directory: Directory,
        fingerprint: str,
        prefill_nodes: Iterable[PrefillNode] = (),
        decode_nodes: Iterable[DecodeNode] = (),
        config: RouterConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
        chance: random.Random | None = None,
    ) -> None:
        """`chance` is what retries are spread by."""
        self._config = config or RouterConfig()
        self._clock = clock
        self._chance = chance or random.Random()
        self._cluster = ClusterView(directory, fingerprint, self._config)
        self._admission = Admission(self._config)
        self._background = Background()
        self._watching: asyncio.Task[None] | None = None
        self._flights: dict[str, Flight] = {}
        self._rejected: Counter[str] = Counter()
        caller = f"router-{uuid.uuid4().hex[:12]}"
        self._roster = Roster(caller, self._take, self._on_lost)
        self._orders = Orders(self._roster)
        self._snapshots = Snapshots(self._roster, self._cluster.index, self._background)
        policy = get_policy(self._config.policy)
        self._routing = Routing(policy, self._cluster, self._roster, self._snapshots)
        self._attempts = Attempts(self._roster, self._cluster.load, self._background, clock)
        self._gate = RetryGate(self._config, lambda: self._admission.num_inflight)
        self._room = WaitingRoom()
        self._first = FirstAttempt(self._routing, self._attempts, self._admission, self._room)
        self._recovery = Recovery(
            self._config, self._routing, self._attempts, self._gate, self._room
        )
        nodes: list[PrefillNode | DecodeNode] = [*prefill_nodes, *decode_nodes]
        for node in nodes:
            self._roster.add(node)

    async def start(self) -> None:
        """Listen to all nodes, and learn what they have cached."""
        self._roster.start()
        self._cluster.refresh()
        self._snapshots.ask()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Abort what is under way and stop listening."""
        self._room.close()
        await asyncio.gather(*map(self._abandon, self._flights.values()))
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None
        await self._background.stop()
        await self._roster.stop()
        self._cluster.close()

    # ------------------------------------------------------------------ nodes come and go

    @property
    def node_ids(self) -> frozenset[str]:
        """Of all nodes that are connected, well or not."""
        return self._roster.connected

    def add_node(self, node: PrefillNode | DecodeNode) -> None:
        """Send jobs to this node, and listen to it.

        Its role is that of `node.info` now. It takes the place of a node of the same id, if there
        is one: what that still says is ignored, and what was under way there goes on elsewhere. So
        a node that has changed its role is added again. While the cluster is paused, so is it.
        """
        node_id = node.info.node_id
        if self._roster.get(node_id) is not None:
            self._cluster.load.forget_node(node_id)
        member = self._roster.add(node)
        for flight in self._flights.values():
            flight.forgive(node_id)
        if self._watching is not None:  # else `start` does the rest
            self._background.spawn(self._orders.welcome(member))
            self._look()

    async def remove_node(self, node_id: str) -> None:
        """Do without the node from now on. What is under way there goes on elsewhere.

        Harmless if it is unknown. Returns when nobody listens to it any more; it is not closed.
        """
        await self._roster.remove(node_id)
        self._cluster.forget_node(node_id)

    def is_lost(self, node: PrefillNode | DecodeNode) -> bool:
        """Whether nobody listens to this very node: its stream has ended, or it was replaced."""
        member = self._roster.member_of(node)
        return member is None or member.lost.is_set()

    async def wait_lost(self, node: PrefillNode | DecodeNode) -> None:
        """Returns when `is_lost`."""
        member = self._roster.member_of(node)
        if member is not None:
            await member.lost.wait()

    # ------------------------------------------------------------------ Backend

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Admit the request and start its first attempt.

        One that follows another starts when that one's prompt is in the caches of its nodes. It is
        admitted at once: what can be refused is refused before any of them has said a token.

        Raises:
            PromptTooLong: no node could ever hold it.
            Overloaded: too much is queued already.
            NoHealthyNode: there is none for a role that is needed.
        """
        until = asyncio.get_running_loop().time() + self._config.admission_wait_s
        try:
            if (leader := self._leader_of(request)) is not None:
                return self._admit_behind(leader, request)
            decision = await self._first.decide(request, until)
            num_tokens = len(request.prompt_token_ids)
            flight = self._admit(request, num_tokens, decision.predicted_ttft_s)
            await self._start_first(flight, decision, until)
        except KvrelayError as error:
            self._rejected[error.label] += 1
            raise
        return flight

    async def status(self) -> ClusterStatus:
        return ClusterStatus(
            nodes=tuple(await self._orders.reports()),
            num_requests=len(self._flights),
            decisions=dict(self._routing.decisions),
            retries=dict(self._attempts.retries),
            rejected=dict(self._rejected),
        )

    async def pause(self, mode: PauseMode) -> dict[str, bool]:
        """Pause all nodes, and those that come before `resume`; whether each is paused now."""
        return await self._orders.pause(mode)

    async def resume(self) -> dict[str, bool]:
        """Let all nodes go on; whether each of them does."""
        return await self._orders.resume()

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> dict[str, bool]:
        """Forget what can be hit on all nodes; whether each of them has."""
        return await self._orders.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def _admit(
        self, request: GenerationRequest, num_tokens: int, predicted_ttft_s: float | None
    ) -> Flight:
        lease = self._admission.admit(num_tokens, predicted_ttft_s=predicted_ttft_s)
        setbacks = Setbacks(self._config, self._chance)
        flight = Flight(request, lease, self._abandon, self._config.stall_timeout_s, setbacks)
        flight.timeline.admitted = self._clock()
        assert request.request_id not in self._flights, f"{request.request_id} is used twice"
        self._flights[request.request_id] = flight
        return flight

    def _leader_of(self, request: GenerationRequest) -> Flight | None:
        """The one whose KV is worth waiting for, if there is one."""
        leader = self._flights.get(request.follows or "")
        if leader is None or len(request.prompt_token_ids) <= HASH_BLOCK_SIZE:
            return None  # with so few tokens there is no whole block to share
        return leader

    def _admit_behind(self, leader: Flight, request: GenerationRequest) -> Flight:
        """Of a prompt that the leader brings, only the last block is a load."""
        flight = self._admit(request, HASH_BLOCK_SIZE, None)
        self._background.spawn(self._follow(flight, leader))
        return flight

    async def _follow(self, flight: Flight, leader: Flight) -> None:
        """Start behind the leader: of the prompt only what is in no whole block is left to do."""
        await leader.settled.wait()
        until = asyncio.get_running_loop().time() + self._config.admission_wait_s
        try:
            if not flight.ended:
                at = frozenset(filter(None, [leader.decode_node_id]))
                decision = await self._first.decide(flight.request, until, siblings_at=at)
                await self._first.start(flight, decision, until)
        except KvrelayError as error:
            self._rejected[error.label] += 1
            flight.fail(error)
            await self._end(flight)

    async def _start_first(self, flight: Flight, decision: RoutingDecision, until: float) -> None:
        started = False
        try:
            await self._first.start(flight, decision, until)
            started = True
        finally:
            if not started:  # refused by all nodes, or our caller was cancelled
                flight.abort()  # whatever nodes still say of it is stale
                self._background.spawn(self._end(flight))

    # ------------------------------------------------------------------ the end of a request

    async def _abandon(self, flight: Flight) -> None:
        """The client wants no more of it. Nodes hear of that even if the client cannot wait."""
        flight.abort()
        await asyncio.wait([self._background.spawn(self._end(flight))])

    async def _end(self, flight: Flight) -> None:
        """Free everything that the flight holds, here and on nodes. Harmless when repeated."""
        if self._flights.pop(flight.request_id, None) is None:
            return
        flight.lease.release()
        self._gate.leave(flight.request_id)
        self._room.wake(flight.request_id)
        flight.timeline.finished = flight.timeline.finished or self._clock()
        await self._attempts.leave(flight)

    # ------------------------------------------------------------------ what nodes say

    def _take(self, member: Member, delta: Delta) -> None:
        flight = self._flights.get(delta.request_id)
        if flight is None or delta.attempt != flight.attempt or flight.ended:
            return  # stale
        if delta.failure is not None:
            self._fail_attempt(flight, member, delta.failure)
            return
        if delta.handed_off or delta.finish_reason is not None:
            flight.open_nodes.discard(member.node_id)
        self._note_tokens(flight, delta)
        if flight.take(delta):
            flight.timeline.finished = self._clock()
            self._background.spawn(self._end(flight))

    def _note_tokens(self, flight: Flight, delta: Delta) -> None:
        if not delta.token_ids:
            return
        now = self._clock()
        if flight.timeline.first_token is None:
            flight.timeline.first_token = now
            flight.lease.first_token()
        self._cluster.load.first_token(flight.ticket)
        self._gate.leave(flight.request_id)
        flight.timeline.last_token = now

    def _on_lost(self, member: Member, why: str) -> None:
        lost = Failure(NodeLost.label, why, retryable=True)
        for flight in self._flights_at(member):
            self._fail_attempt(flight, member, lost)
        self._look()

    def _flights_at(self, member: Member) -> list[Flight]:
        return [flight for flight in self._flights.values() if flight.is_open_at(member)]

    def _fail_attempt(self, flight: Flight, member: Member, failure: Failure) -> None:
        logger.info("attempt %s failed on %s: %s", flight.ticket, member.node_id, failure.message)
        flight.open_nodes.discard(member.node_id)
        lost_prefill = failure.label == NodeLost.label and member.role is Role.PREFILL
        if lost_prefill and self._config.decode_recomputes and flight.open_nodes:
            return  # the decode node notices, and goes on alone
        flight.blame(member, failure)
        if failure.retryable:
            self._cluster.load.ended(flight.ticket)
            self._gate.leave(flight.request_id)
            self._keep_reservation(flight)
            others = flight.take_open()
            flight.next_attempt()  # at once: what the old attempt says from now on is stale
            self._background.spawn(self._recover(flight, failure, others))
        else:
            flight.fail(error_of(failure))
            self._background.spawn(self._end(flight))

    @staticmethod
    def _keep_reservation(flight: Flight) -> None:
        """On the decode node, which does not need another one if only the prefill node is lost."""
        decode = [member for member in flight.members.values() if member.role is Role.DECODE]
        for member in decode[:1]:
            flight.keep_reservation(member)

    async def _recover(self, flight: Flight, failure: Failure, others: list[Member]) -> None:
        await self._attempts.cancel(flight.request_id, others)
        try:
            await self._recovery.recover(flight, failure)
        except KvrelayError as error:
            flight.fail(error)
            await self._end(flight)

    # ------------------------------------------------------------------ looking after nodes

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def _look(self) -> None:
        """Tell those who wait of nodes that can be used now, and give up those that are silent."""
        nodes = self._cluster.nodes(self._roster.contacts())
        self._snapshots.ask()
        self._room.tell(state_of(nodes))
        silent = {node.node_id: node for node in _silent(nodes)}
        for member in self._roster:
            member.silent = member.node_id in silent
        for node in silent.values():
            self._give_up(node)

    def _give_up(self, node: NodeView) -> None:
        """It hangs, or is cut off: what it has goes on elsewhere. It may come back."""
        member = self._roster.get(node.node_id)
        assert member is not None
        flights = self._flights_at(member)
        if not flights:
            return
        why = f"node {node.node_id} was silent for {node.silence_s:.1f} s"
        logger.warning("%s; %d requests go on elsewhere", why, len(flights))
        self._attempts.cancel_later([flight.request_id for flight in flights], member)
        for flight in flights:
            self._fail_attempt(flight, member, Failure(NodeLost.label, why, retryable=True))


def _silent(nodes: Iterable[NodeView]) -> list[NodeView]:
    """Connected nodes that have been silent for too long, while others have not.

    If all are, it is the directory that is away, or there is nobody to go to.
    """
    connected = [node for node in nodes if node.connected]
    if not any(node.silence_s < node.ttl_s / 2 for node in connected):
        return []
    return [node for node in connected if not node.alive]
