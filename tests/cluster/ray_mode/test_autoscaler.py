"""When the number of nodes changes, and when it does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling_config import AutoscalingConfig, ScalingBounds
from cluster.ray_mode.autoscaler import Autoscaler
from directory import NodeRecord
from protocol import BlockCounts, ConfigError, Role
from tests.directory.conformance import info, status

P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED
BOUNDS = ScalingBounds(min=1, max=3)
CONFIG = AutoscalingConfig(
    enabled=True, prefill=BOUNDS, decode=BOUNDS, unified=BOUNDS, target_queue_s=1.0
)


class World:
    """One autoscaler and the time that it sees."""

    def __init__(self, config: AutoscalingConfig = CONFIG) -> None:
        self.now = 0.0
        self.autoscaler = Autoscaler(config, lambda: self.now)

    def look(
        self, role: Role, records: Sequence[NodeRecord], *, for_s: float = 0.0
    ) -> dict[Role, int]:
        """The wish after looking for so long, at the interval of the configuration."""
        until = self.now + for_s
        wish: dict[Role, int] = {}
        while not wish:
            wish = self.autoscaler.look(records, {role: len(records)})
            if self.now >= until:
                break
            self.now += CONFIG.interval_s
        return wish


def nodes(
    role: Role, count: int, *, queue_s: float = 0.0, used: int = 0, draining: bool = False
) -> list[NodeRecord]:
    blocks = BlockCounts(total=100, free=100 - used, cached=0, used=used, quarantined=0)
    its = msgspec.structs.replace(
        status(),
        role=role,
        queued_tokens=int(queue_s * 1000),
        prefill_tokens_per_s=1000.0,
        blocks=blocks,
        draining=draining,
    )
    return [NodeRecord(info(f"n{n}", role=role), its, 0.0, 10.0) for n in range(count)]


class TestGrowing:
    def test_only_after_patience(self) -> None:
        world = World()
        long = nodes(P, 1, queue_s=5)
        assert world.look(P, long, for_s=CONFIG.scale_up_after_s - 5) == {}
        assert world.look(P, long, for_s=5) == {P: 2}
        assert "prefill from 1 to 2: queues of 5.00 s, target 1 s" in world.autoscaler.explain()

    def test_a_peak_that_passes_changes_nothing(self) -> None:
        world = World()
        for _ in range(10):
            assert world.look(P, nodes(P, 1, queue_s=5), for_s=10) == {}
            assert world.look(P, nodes(P, 1, queue_s=1)) == {}

    def test_not_beyond_max(self) -> None:
        assert World().look(P, nodes(P, 3, queue_s=50), for_s=1000) == {}

    def test_decode_nodes_by_their_memory(self) -> None:
        assert World().look(D, nodes(D, 1, used=95), for_s=20) == {D: 2}
        assert World().look(D, nodes(D, 1, used=75, queue_s=50), for_s=20) == {}

    @pytest.mark.parametrize("load", [{"used": 95}, {"queue_s": 5.0}])
    def test_unified_nodes_by_either(self, load: dict[str, float]) -> None:
        assert World().look(U, nodes(U, 1, **load), for_s=20) == {U: 2}  # type: ignore[arg-type]

    def test_each_step_needs_patience_of_its_own(self) -> None:
        world = World()
        assert world.look(P, nodes(P, 1, queue_s=9), for_s=20) == {P: 2}
        assert world.look(P, nodes(P, 2, queue_s=9), for_s=10) == {}
        assert world.look(P, nodes(P, 2, queue_s=9), for_s=10) == {P: 3}

    def test_at_once_if_there_are_fewer_than_min(self) -> None:
        config = AutoscalingConfig(enabled=True, decode=ScalingBounds(min=2, max=4))
        assert World(config).look(D, nodes(D, 1)) == {D: 2}


class TestShrinking:
    def test_only_after_more_patience(self) -> None:
        world = World()
        assert world.look(P, nodes(P, 3), for_s=CONFIG.scale_down_after_s - 5) == {}
        assert world.look(P, nodes(P, 3), for_s=5) == {P: 2}

    def test_not_if_the_others_could_not_bear_it(self) -> None:
        assert World().look(P, nodes(P, 2, queue_s=0.7), for_s=1000) == {}

    def test_not_below_min(self) -> None:
        assert World().look(P, nodes(P, 1), for_s=1000) == {}


class TestStandingStill:
    def test_while_a_node_is_missing_or_drains(self) -> None:
        world = World()
        busy = nodes(P, 2, queue_s=9)
        for _ in range(100):
            world.now += CONFIG.interval_s
            assert world.autoscaler.look(busy[:1], {P: 2}) == {}
            assert world.look(P, nodes(P, 2, queue_s=9, draining=True)) == {}

    def test_without_bounds(self) -> None:
        world = World(AutoscalingConfig(enabled=True))
        assert world.look(P, nodes(P, 1, queue_s=99), for_s=1000) == {}


@given(loads=st.lists(st.floats(0, 5), min_size=5, max_size=60))
def test_it_stays_in_its_bounds_and_does_not_flutter(loads: list[float]) -> None:
    world, count, changes = World(), 1, []
    for load in loads:
        wish = world.look(P, nodes(P, count, queue_s=load / count))
        for new in wish.values():
            assert abs(new - count) == 1
            assert 1 <= new <= 3
            changes.append((world.now, new > count))
            count = new
        world.now += CONFIG.interval_s
    for (before, _), (after, grows) in itertools.pairwise(changes):
        patience = CONFIG.scale_up_after_s if grows else CONFIG.scale_down_after_s
        assert after - before >= patience


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"target_kv_use": 0.0}, "target_kv_use"),
        ({"target_kv_use": 1.5}, "target_kv_use"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"interval_s": float("nan")}, "interval_s"),
        ({"scale_up_after_s": -1.0}, "scale_up_after_s"),
    ],
)
def test_what_it_may_not_be_told(values: dict[str, float], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        AutoscalingConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", [{"min": 0}, {"max": 0}, {"min": 3, "max": 2}])
def test_bounds_that_hold_nothing(bounds: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ScalingBounds(**bounds)
