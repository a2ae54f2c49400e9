"""An older request lacks the blocks that are reserved for a younger one."""

from __future__ import annotations

import pytest

from tests.hash_model import prompt_of
from tests.kv_transfer.handoff_world import World


@pytest.mark.parametrize("p_has_begun", [False, True])
def test_the_younger_gives_its_blocks_back_and_both_are_served(p_has_begun: bool) -> None:
    """The younger one's blocks come back at once, or after a word with P that computes it."""
    world = World(reserve="on_arrival")
    old, young = world.ask(prompt_of(60, 1), 5), world.ask(prompt_of(100, 2), 5)
    world.give_d(young)
    if p_has_begun:
        world.give_p(young)
        world.p.round()
        world.network.deliver()  # the start
    world.d.round()
    world.d.round()
    assert world.d.host.status().blocks.used == 7
    world.give_d(old, prefill_endpoint=None)  # D computes it itself
    for _ in range(2):
        world.d.round()
    revoked = world.d.scheduler.stats.num_revoked_reservations
    assert revoked == (0 if p_has_begun else 1)
    if p_has_begun:
        while world.network.mail:  # Destination and Revoke: P has nothing to push yet
            world.network.deliver()
        world.p.connector.poll()
        while world.network.mail:
            world.network.deliver()
        for _ in range(2):
            world.d.round()
        assert world.d.scheduler.stats.num_revoked_reservations == 1
    if not p_has_begun:
        world.give_p(young)
    world.go_on(80)
    finished = [delta.request_id for delta in world.d.stream.deltas if delta.finish_reason]
    assert sorted(finished) == [old.request_id, young.request_id]
    world.check_answers()
    world.calm_down()
    world.p.check_nothing_is_left()
    world.d.check_nothing_is_left()
