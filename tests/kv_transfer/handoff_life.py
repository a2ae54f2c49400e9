"""What may happen at any time in a world of nodes that hand requests off, whatever it is about."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kv_transfer.handoff_world import CONFIG, World

_PREFIX = random.Random(0).choices(range(2, 50_000), k=32)


def prompt_of(length: int, seed: int, shared: int) -> list[int]:
    own = random.Random(f"{length}/{seed}").choices(range(2, 50_000), k=length)
    return _PREFIX[:shared] + own


def settings_of_lives(num_steps: int) -> settings:
    """Of 40 lives, or of 600 if there is time."""
    return settings(
        max_examples=settings().max_examples * 2 // 5,
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


class Life(RuleBasedStateMachine):
    """How requests come, and who goes on, is to be added."""

    world: World

    @precondition(lambda self: self.world.network.mail)
    @rule(count=st.integers(1, 3))
    def messages_arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.world.network.mail))):
            self.world.network.deliver()

    @precondition(lambda self: self.world.network.writes)
    @rule(data=st.data())
    def a_write_goes_on(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.world.network.writes)).go_on()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), seldom=st.integers(0, 2))
    def the_client_leaves(self, data: st.DataObject, seldom: int) -> None:
        if not seldom:
            self.world.cancel(data.draw(st.sampled_from(list(self.world.requests.values()))))

    @rule(
        seconds=st.sampled_from((CONFIG.heartbeat_s, CONFIG.transfer_timeout_s)),
        seldom=st.integers(0, 2),
    )
    def time_goes_by(self, seconds: float, seldom: int) -> None:
        if not seldom:
            self.world.now += seconds + 0.1

    @invariant()
    def all_blocks_are_accounted_for(self) -> None:
        for node in (self.world.d, *self.world.prefill):
            assert node.scheduler.block_counts().balanced

    def end(self) -> None:
        """All that is under way ends, as it has to."""
        self.world.calm_down()
        self.world.check_answers()
        for node in (self.world.d, *self.world.prefill):
            node.check_nothing_is_left()
