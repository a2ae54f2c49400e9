from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import Overloaded
from router import Admission, Lease, RouterConfig


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock | None = None, **config: Any) -> Admission:
    return Admission(RouterConfig(**config), clock or Clock())


def test_requests_are_bounded_and_come_back() -> None:
    admission = make(max_inflight_requests=2)
    first, _ = admission.admit(10), admission.admit(10)
    with pytest.raises(Overloaded, match="2 requests are in flight, the limit is 2"):
        admission.admit(10)
    first.release()
    admission.admit(10)
    assert admission.num_inflight == 2


def test_queued_tokens_are_bounded_until_the_first_token() -> None:
    admission = make(max_queued_tokens=100)
    first = admission.admit(60)
    with pytest.raises(Overloaded, match="60 prompt tokens are queued"):
        admission.admit(50)
    first.first_token()
    first.first_token()
    assert (admission.num_inflight, admission.queued_tokens) == (1, 0)
    admission.admit(50)


def test_a_prompt_over_the_limit_is_admitted_when_alone() -> None:
    admission = make(max_queued_tokens=100)
    with admission.admit(500), pytest.raises(Overloaded):
        admission.admit(1)
    with pytest.raises(Overloaded), admission.admit(1):
        admission.admit(500)


def test_a_lease_frees_itself_exactly_once() -> None:
    admission = make()
    admission.admit(5)
    with pytest.raises(ZeroDivisionError), admission.admit(10) as lease:
        raise ZeroDivisionError
    lease.release()
    lease.first_token()
    assert (admission.num_inflight, admission.queued_tokens) == (1, 5)


def test_the_slo_refuses_and_tells_how_long_the_queue_is_over_it() -> None:
    admission = make(max_predicted_ttft_s=2.0)
    admission.admit(10, predicted_ttft_s=2.0)
    admission.admit(10)  # nothing predicted, nothing refused
    with pytest.raises(Overloaded, match=r"5\.50 s, the limit is 2 s") as caught:
        admission.admit(10, predicted_ttft_s=5.5)
    assert caught.value.retry_after_s == pytest.approx(3.5)
    assert admission.num_inflight == 2


def test_retry_after_follows_the_measured_rate() -> None:
    clock = Clock()
    admission = make(clock, max_inflight_requests=3, max_queued_tokens=1000)
    leases = [admission.admit(300) for _ in range(3)]
    with pytest.raises(Overloaded) as caught:
        admission.admit(1)
    assert caught.value.retry_after_s == 1.0  # nothing measured yet
    clock.now += 2.0
    leases[0].release()  # one request and 300 tokens in two seconds
    admission.admit(300)
    with pytest.raises(Overloaded) as caught:
        admission.admit(1)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    leases[1].first_token()
    leases[1].release()  # two requests and 600 tokens in two seconds
    with pytest.raises(Overloaded) as caught:
        admission.admit(700)  # 300 too many
    assert caught.value.retry_after_s == pytest.approx(1.0)


def test_idle_time_is_not_taken_for_slowness() -> None:
    clock = Clock()
    admission = make(clock, max_inflight_requests=2)
    admission.admit(10).release()
    clock.now += 3600
    first, _ = admission.admit(10), admission.admit(10)
    clock.now += 0.5
    first.release()
    admission.admit(10)
    with pytest.raises(Overloaded) as caught:
        admission.admit(10)
    assert caught.value.retry_after_s == pytest.approx(0.5)


def test_retry_after_stays_within_reason() -> None:
    clock = Clock()
    admission = make(clock, max_inflight_requests=2)
    first, _ = admission.admit(10), admission.admit(10)
    first.release()
    admission.admit(10)
    for elapsed_s, expected in ((0.0, 0.1), (1e6, 60.0)):
        clock.now += elapsed_s
        with pytest.raises(Overloaded) as caught:
            admission.admit(10)
        assert caught.value.retry_after_s == expected


OPERATIONS = st.one_of(
    st.tuples(st.just("admit"), st.integers(1, 60)),
    st.tuples(st.sampled_from(["first_token", "release"]), st.integers(0, 10)),
)


@given(st.lists(OPERATIONS, max_size=60))
def test_counts_are_those_of_the_open_leases(operations: list[tuple[str, int]]) -> None:
    admission = make(max_inflight_requests=4, max_queued_tokens=100)
    leases: list[Lease] = []
    opened: dict[Lease, int] = {}  # → queued tokens
    for operation, value in operations:
        if operation == "admit":
            queued = sum(opened.values())
            full = len(opened) == 4 or 0 < queued > 100 - value
            try:
                lease = admission.admit(value)
            except Overloaded:
                assert full
            else:
                assert not full
                leases.append(lease)
                opened[lease] = value
        elif leases:
            lease = leases[value % len(leases)]
            if operation == "first_token":
                lease.first_token()
                opened.update({lease: 0} if lease in opened else {})
            else:
                lease.release()
                opened.pop(lease, None)
        assert admission.num_inflight == len(opened)
        assert admission.queued_tokens == sum(opened.values())
