"""Prefill nodes are lost in any state, and others take over: right tokens, and nothing left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from decode_node.config import Reserve
from kv_transfer import HandoffConnector
from protocol import GenerationRequest, HandoffTicket
from tests.kv_transfer.handoff_life import Life, prompt_of, settings_of_lives
from tests.kv_transfer.handoff_world import CONFIG, PlayedNode, World


class KeepsReservations:
    """Looks at what D does when a request gets another P, and at what must stay as it is."""

    def __init__(self, node: PlayedNode) -> None:
        self._scheduler = node.scheduler
        self._connector: HandoffConnector = node.connector
        self._retarget = node.connector.retarget_sink
        self.kept: Counter[bool] = Counter()
        node.connector.retarget_sink = self  # type: ignore[method-assign]

    def __call__(self, request_id: str, ticket: HandoffTicket, peer: str) -> bool:
        before = self._facts(request_id)
        kept = self._retarget(request_id, ticket, peer)
        self.kept[kept] += 1
        assert self._facts(request_id) == before
        if kept:
            assert self._connector.sinks[request_id].ticket == ticket
        return kept

    def _facts(self, request_id: str) -> Sequence[object]:
        """Its blocks, here and with the scheduler; all who wait, in order; what is free."""
        scheduler, sink = self._scheduler, self._connector.sinks.get(request_id)
        request = scheduler.requests.get(request_id)
        waiting = [r.request_id for q in (scheduler.skipped_waiting, scheduler.waiting) for r in q]
        blocks = None if request is None else (request.block_ids, request.status)
        mine = None if sink is None else sink.block_ids
        return (mine, blocks, waiting, scheduler.block_counts())


class Retargeting(Life):
    """A dispatcher that tries again at once, with the other P if there is one, and the same D."""

    exact_fences = True
    pipelined = False
    reserve: Reserve = "on_start"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            exact_fences=self.exact_fences,
            pipelined=self.pipelined,
            reserve=self.reserve,
            spare=True,
        )
        self.reservations = KeepsReservations(self.world.d)
        self.attempts: dict[str, int] = {}
        self.at: dict[str, PlayedNode] = {}  # where each request is prefilled
        self.jobs: list[tuple[GenerationRequest, PlayedNode | None, int, tuple[int, ...]]] = []

    def attempt(self, request: GenerationRequest, node: PlayedNode) -> None:
        number = self.attempts[request.request_id] = self.attempts.get(request.request_id, -1) + 1
        self.at[request.request_id] = node
        emitted = self.world.emitted(request)
        self.jobs += [(request, node, number, emitted), (request, None, number, emitted)]

    def give(self, index: int) -> None:
        request, node, number, emitted = self.jobs.pop(index)
        if number < self.attempts[request.request_id] or self.is_over(request):
            return  # taken back before it was sent
        if node is None:
            endpoint = self.at[request.request_id].transport.endpoint
            self.world.give_d(request, attempt=number, emitted=emitted, prefill_endpoint=endpoint)
        elif node in self.world.prefill:
            self.world.give_p(request, node, attempt=number, emitted=emitted)

    def again(self, request: GenerationRequest, node: PlayedNode) -> None:
        """The attempt has failed; D is not told before the next one."""
        old = self.at[request.request_id]
        if old in self.world.prefill:
            old.cancel(request.request_id)
        self.attempt(request, node)

    def is_over(self, request: GenerationRequest) -> bool:
        """Whether it has all its tokens, or the attempt goes on without a prefill node."""
        return (
            request.request_id in self.world.cancelled
            or len(self.world.emitted(request)) == request.sampling.max_tokens
        )

    @property
    def open(self) -> list[GenerationRequest]:
        return [r for r in self.world.requests.values() if not self.is_over(r)]

    def failed(self, request: GenerationRequest) -> bool:
        """Whether somebody has said that the attempt failed, or its P is dead."""
        told = [d for node in self.world.nodes for d in self.world.told(node, request)]
        number = self.attempts[request.request_id]
        lost = self.at[request.request_id] not in self.world.prefill
        return lost or any(d.failure is not None and d.attempt == number for d in told)

    @precondition(lambda self: self.jobs)
    @rule(rounds=st.integers(1, 6))
    def all_jobs_arrive_and_are_worked_on(self, rounds: int) -> None:
        """So far that blocks are reserved and bytes about to move."""
        while self.jobs:
            self.give(0)
        self.world.go_on(rounds, writes=False)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_cut=st.booleans(), num_blocks=st.integers(0, 2))
    def p_is_lost_in_the_middle(self, data: st.DataObject, is_cut: bool, num_blocks: int) -> None:
        """And the next attempt is there at once, or soon."""
        request = data.draw(st.sampled_from(self.under_way))
        for write in self.world.network.writes[:num_blocks]:
            write.go_on()
        if is_cut:
            node = self.at[request.request_id]
            self.world.network.cut(node.transport, self.world.d.transport)
            self.world.d.round()
        self.again(request, data.draw(st.sampled_from(self.world.prefill)))
        while self.jobs:
            self.give(0)
        self.world.d.round()

    @property
    def under_way(self) -> list[GenerationRequest]:
        """Those whose blocks are reserved at D, by a prefill node that lives."""
        sinks = self.world.d.connector.sinks.values()
        reserved = {sink.ticket for sink in sinks if sink.block_ids and not sink.released}
        tickets = {
            r.request_id: HandoffTicket(r.request_id, self.attempts[r.request_id])
            for r in self.open
        }
        return [
            r
            for r in self.open
            if tickets[r.request_id] in reserved and self.at[r.request_id] in self.world.prefill
        ]

    # ------------------------------------------------------------------ the ordinary course

    @precondition(lambda self: len(self.world.requests) < 6)
    @rule(
        length=st.sampled_from((1, 16, 33, 60, 90)),
        shared=st.sampled_from((0, 16, 32)),
        max_tokens=st.sampled_from((3, 16)),
        data=st.data(),
    )
    def ask(self, length: int, shared: int, max_tokens: int, data: st.DataObject) -> None:
        prompt = prompt_of(length, len(self.world.requests), shared)
        node = data.draw(st.sampled_from(self.world.prefill))
        self.attempt(self.world.ask(prompt, max_tokens), node)

    @precondition(lambda self: self.jobs)
    @rule(first=st.booleans())
    def a_job_arrives(self, first: bool) -> None:
        self.give(0 if first else -1)

    @rule(rounds=st.integers(1, 4), num_early_blocks=st.integers(0, 3), data=st.data())
    def a_node_goes_on(self, rounds: int, num_early_blocks: int, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from((self.world.d, *self.world.prefill)))
        for _ in range(rounds):
            node.round(num_early_blocks)

    @rule(rounds=st.integers(1, 4), writes=st.booleans())
    def all_go_on(self, rounds: int, writes: bool) -> None:
        self.world.go_on(rounds, writes=writes)

    # ------------------------------------------------------------------ what may go wrong

    @precondition(lambda self: len(self.world.prefill) > 1)
    @rule(data=st.data(), seldom=st.integers(0, 3))
    def a_prefill_node_dies(self, data: st.DataObject, seldom: int) -> None:
        if not seldom:
            self.world.kill(data.draw(st.sampled_from(self.world.prefill)))

    @rule(data=st.data())
    def two_nodes_lose_each_other(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.world.prefill))
        self.world.network.cut(node.transport, self.world.d.transport)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def another_attempt(self, data: st.DataObject) -> None:
        """For a reason that D need not know of."""
        request = data.draw(st.sampled_from(self.open))
        self.again(request, data.draw(st.sampled_from(self.world.prefill)))

    @precondition(lambda self: any(map(self.failed, self.open)))
    @rule(data=st.data())
    def what_failed_goes_on_elsewhere(self, data: st.DataObject) -> None:
        for request in filter(self.failed, self.open):
            self.again(request, data.draw(st.sampled_from(self.world.prefill)))

    # ------------------------------------------------------------------ what is always true

    @invariant()
    def each_hand_off_is_found_by_its_ticket(self) -> None:
        side = self.world.d.connector._receive
        assert side._by_ticket == {sink.ticket: sink for sink in side.sinks.values()}

    def teardown(self) -> None:
        for _ in range(20):
            while self.jobs:
                self.give(0)
            for _ in range(6):
                self.world.go_on(5)
            self.world.now += CONFIG.heartbeat_s + 0.1
            for request in filter(self.failed, self.open):
                self.again(request, self.world.prefill[-1])
            if not self.open:
                break
        assert not self.open, "not served"
        self.jobs.clear()
        left = set(self.world.cancelled)
        for request in self.world.requests.values():  # as the end of any request is told
            self.world.cancel(request)
        self.world.cancelled = left
        self.end()


class RetargetingWithoutFences(Retargeting):
    """Only P's word is proof, or its death."""

    exact_fences = False
    pipelined = True


class RetargetingOnArrival(Retargeting):
    """D reserves before P has started."""

    reserve: Reserve = "on_arrival"
    pipelined = True


_SETTINGS = settings_of_lives(num_steps=60)

TestRetargeting = Retargeting.TestCase
TestRetargeting.settings = _SETTINGS
TestRetargetingWithoutFences = RetargetingWithoutFences.TestCase
TestRetargetingWithoutFences.settings = _SETTINGS
TestRetargetingOnArrival = RetargetingOnArrival.TestCase
TestRetargetingOnArrival.settings = _SETTINGS
