"""Any order of events between two nodes: right tokens or a failure, and nothing left."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kv_transfer import OnTransferFailure
from protocol import GenerationRequest
from tests.kv_transfer.handoff_life import Life, prompt_of, settings_of_lives
from tests.kv_transfer.handoff_world import World


class HandoffLife(Life):
    """What may happen on any network. Messages keep their order, and none gets lost."""

    exact_fences = True
    pipelined = False  # plan a step while the one before is computed
    layerwise = False
    block_sizes = (16, 16)  # of P and of D
    on_transfer_failure: OnTransferFailure = "retry"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            exact_fences=self.exact_fences,
            pipelined=self.pipelined,
            layerwise=self.layerwise,
            block_sizes=self.block_sizes,
            on_transfer_failure=self.on_transfer_failure,
        )
        self.for_p: list[GenerationRequest] = []
        self.for_d: list[GenerationRequest] = []

    # ------------------------------------------------------------------ the ordinary course

    @precondition(lambda self: len(self.world.requests) < 8)
    @rule(
        length=st.sampled_from((1, 16, 33, 60, 90)),
        shared=st.sampled_from((0, 16, 32)),
        max_tokens=st.sampled_from((2, 3, 16)),
        priority=st.integers(0, 2),
    )
    def ask(self, length: int, shared: int, max_tokens: int, priority: int) -> None:
        prompt = prompt_of(length, len(self.world.requests), shared)
        request = self.world.ask(prompt, max_tokens, priority)
        self.for_p.append(request)
        self.for_d.append(request)

    @precondition(lambda self: self.for_p)
    @rule()
    def give_p(self) -> None:
        self.world.give_p(self.for_p.pop(0))

    @precondition(lambda self: self.for_d)
    @rule()
    def give_d(self) -> None:
        self.world.give_d(self.for_d.pop(0))

    @rule(rounds=st.integers(1, 4), num_early_blocks=st.integers(0, 3))
    def p_goes_on(self, rounds: int, num_early_blocks: int) -> None:
        for _ in range(rounds):
            self.world.p.round(num_early_blocks)

    @rule(rounds=st.integers(1, 4), num_early_blocks=st.integers(0, 1))
    def d_goes_on(self, rounds: int, num_early_blocks: int) -> None:
        for _ in range(rounds):
            self.world.d.round(num_early_blocks)

    @rule(rounds=st.integers(1, 4))
    def all_but_writes_go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            while self.world.network.mail:
                self.world.network.deliver()
            self.world.p.round()
            self.world.d.round()

    # ------------------------------------------------------------------ what may go wrong

    @precondition(lambda self: self.world.network.writes)
    @rule(data=st.data(), seldom=st.integers(0, 2))
    def a_write_fails(self, data: st.DataObject, seldom: int) -> None:
        if not seldom:
            data.draw(st.sampled_from(self.world.network.writes)).fail()

    def teardown(self) -> None:
        for request in self.for_p:
            self.world.give_p(request)
        for request in self.for_d:
            self.world.give_d(request)
        self.end()


class HandoffLifeWithoutFences(HandoffLife):
    """D cannot keep P from writing: only P's word is proof."""

    exact_fences = False


class HandoffLifeOnABadNetwork(HandoffLife):
    """Messages get lost, come twice, and overtake each other; blocks are damaged."""

    @precondition(lambda self: self.world.network.mail)
    @rule(data=st.data())
    def a_message_is_lost(self, data: st.DataObject) -> None:
        mail = self.world.network.mail
        del mail[data.draw(st.integers(0, len(mail) - 1))]

    @precondition(lambda self: self.world.network.mail)
    @rule(data=st.data())
    def a_message_comes_twice(self, data: st.DataObject) -> None:
        mail = self.world.network.mail
        mail.append(data.draw(st.sampled_from(mail)))

    @precondition(lambda self: self.world.network.mail)
    @rule(data=st.data())
    def a_message_overtakes_others(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.world.network.mail) - 1))
        self.world.network.deliver(index)

    @rule(data=st.data())
    def a_block_is_damaged(self, data: st.DataObject) -> None:
        """Only what a hand-off that is under way has brought; the rest is D's own."""
        sinks = [s for s in self.world.d.connector.sinks.values() if s.block_ids]
        if sinks:
            sink = data.draw(st.sampled_from(sinks))
            block_id = data.draw(st.sampled_from(sink.block_ids))
            self.world.d.runner.pool[block_id, 0, 0, 0] ^= 1


_SETTINGS = settings_of_lives(num_steps=80)

TestHandoffLife = HandoffLife.TestCase
TestHandoffLife.settings = _SETTINGS
TestHandoffLifeWithoutFences = HandoffLifeWithoutFences.TestCase
TestHandoffLifeWithoutFences.settings = _SETTINGS
TestHandoffLifeOnABadNetwork = HandoffLifeOnABadNetwork.TestCase
TestHandoffLifeOnABadNetwork.settings = _SETTINGS


class PipelinedLife(HandoffLife):
    pipelined = True
    layerwise = True


class PipelinedLifeWithoutFences(HandoffLifeWithoutFences):
    pipelined = True
    block_sizes = (16, 32)


class PipelinedLifeOnABadNetwork(HandoffLifeOnABadNetwork):
    pipelined = True
    layerwise = True
    on_transfer_failure = "recompute"


class UnequalLifeOnABadNetwork(HandoffLifeOnABadNetwork):
    exact_fences = False
    layerwise = True
    block_sizes = (32, 16)
    on_transfer_failure = "recompute"


TestUnequalLifeOnABadNetwork = UnequalLifeOnABadNetwork.TestCase
TestUnequalLifeOnABadNetwork.settings = _SETTINGS
TestPipelinedLife = PipelinedLife.TestCase
TestPipelinedLife.settings = _SETTINGS
TestPipelinedLifeWithoutFences = PipelinedLifeWithoutFences.TestCase
TestPipelinedLifeWithoutFences.settings = _SETTINGS
TestPipelinedLifeOnABadNetwork = PipelinedLifeOnABadNetwork.TestCase
TestPipelinedLifeOnABadNetwork.settings = _SETTINGS
