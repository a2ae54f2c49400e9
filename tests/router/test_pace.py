from __future__ import annotations

import pytest

from protocol import NodeStatus
from router.pace import Pace
from tests.router.nodes import make_info, make_status

INFO = make_info("d0")


def busy(num_steps: int, num_running: int = 1) -> NodeStatus:
    return make_status(INFO, num_steps=num_steps, num_running=num_running)


def observe(pace: Pace, *statuses: tuple[float, NodeStatus]) -> None:
    for taken_at, status in statuses:
        pace.observed(status, taken_at=taken_at)


def test_steps_between_two_statuses_of_a_busy_node() -> None:
    pace = Pace()
    assert pace.step_s("d0", 0.0) == 0.0
    observe(pace, (1.0, busy(100)), (1.4, busy(120)))
    assert pace.step_s("d0", 1.4) == pytest.approx(0.02)


def test_many_statuses_at_short_intervals_are_taken_together() -> None:
    pace = Pace()
    observe(pace, *((1.0 + 0.01 * n, busy(100 + n)) for n in range(40)))
    assert pace.step_s("d0", 1.4) == pytest.approx(0.01)


def test_idle_time_says_nothing() -> None:
    pace = Pace()
    observe(pace, (1.0, busy(100)), (2.0, busy(100, num_running=0)), (9.0, busy(101)))
    assert pace.step_s("d0", 9.0) == 0.0


def test_it_gets_slower_and_the_latest_counts_most() -> None:
    pace = Pace()
    observe(pace, (1.0, busy(0)), (2.0, busy(100)))
    for n in range(1, 20):
        observe(pace, (2.0 + n, busy(100 + n)))
    assert pace.step_s("d0", 21.0) == pytest.approx(1.0, rel=0.01)


def test_a_measurement_is_forgotten_after_a_while_and_with_the_node() -> None:
    pace = Pace()
    observe(pace, (1.0, busy(0)), (2.0, busy(1)))
    assert pace.step_s("d0", 31.0) == 1.0
    assert pace.step_s("d0", 33.0) == 0.0
    pace.forget_node("d0")
    assert pace.step_s("d0", 2.0) == 0.0


def test_a_restarted_node_counts_from_nothing() -> None:
    pace = Pace()
    observe(pace, (1.0, busy(1000)), (2.0, busy(3)), (3.0, busy(13)))
    assert pace.step_s("d0", 3.0) == pytest.approx(0.1)
