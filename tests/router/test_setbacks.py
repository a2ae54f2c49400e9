from __future__ import annotations

import random

import pytest

from router import RouterConfig
from router.setbacks import Setback, Setbacks


def make(seed: int = 0, **config: object) -> Setbacks:
    return Setbacks(RouterConfig(**config), random.Random(seed))  # type: ignore[arg-type]


def noted(setbacks: Setbacks, *labels: str, num_tokens: int = 0) -> Setbacks:
    for label in labels:
        setbacks.note(label, num_tokens)
    return setbacks


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("node_lost", Setback.LOSS),
        ("overloaded", Setback.MOVED),
        ("transfer_failed", Setback.FAULT),
        ("never heard of", Setback.FAULT),
    ],
)
def test_kinds(label: str, kind: Setback) -> None:
    assert Setback.of(label) is kind


def test_faults_and_losses_have_limits_of_their_own() -> None:
    config = {"max_attempts": 2, "max_lost_attempts": 4}
    fault, loss, moved = "transfer_failed", "node_lost", "overloaded"
    assert not noted(make(**config), fault, loss, moved, loss).too_many
    assert noted(make(**config), fault, loss, fault).too_many
    assert noted(make(**config), loss, moved, loss, moved).too_many


def test_a_token_makes_up_for_everything() -> None:
    setbacks = noted(make(max_attempts=2), "transfer_failed")
    assert not noted(setbacks, "transfer_failed", num_tokens=1).too_many
    assert noted(setbacks, "transfer_failed", num_tokens=1).too_many


def test_pauses_double_up_to_a_limit_and_differ() -> None:
    config = {"retry_backoff_s": 0.1, "retry_backoff_max_s": 0.5, "retry_jitter": 0.5}
    setbacks, other = make(1, **config), make(2, **config)
    pauses = []
    for base in (0.1, 0.2, 0.4, 0.5, 0.5):
        pauses.append(noted(setbacks, "node_lost").pause_s())
        assert base <= pauses[-1] <= 1.5 * base
    assert pauses[0] != noted(other, "node_lost").pause_s()


def test_whoever_is_moved_does_not_wait_until_it_happens_again() -> None:
    setbacks = noted(make(retry_jitter=0.0), "overloaded")
    assert setbacks.pause_s() == 0.0
    assert noted(setbacks, "overloaded").pause_s() == RouterConfig.retry_backoff_s
