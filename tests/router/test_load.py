from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol import HandoffTicket, NodeStatus, Role
from router import LoadTracker, NodeLoad
from tests.router.nodes import make_info, make_status

NOTHING = NodeLoad()
PREFILL = NodeLoad(queued_tokens=100, requests=1)
DECODE = NodeLoad(blocks=10, requests=1)


def ticket(number: int) -> HandoffTicket:
    return HandoffTicket(f"r{number}", 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def status(node_id: str, **changes: int) -> NodeStatus:
    return make_status(make_info(node_id, Role.DECODE), **changes)


def test_what_was_sent_counts_until_it_ends() -> None:
    tracker = LoadTracker(Clock())
    for number in range(3):
        tracker.sent(ticket(number), {"p0": PREFILL, "d0": DECODE})
    assert tracker.load("p0") == NodeLoad(300, 0, 3)
    assert tracker.load("d0") == NodeLoad(0, 30, 3)
    assert tracker.load("other") == NOTHING
    for number in range(3):
        tracker.ended(ticket(number))
        tracker.ended(ticket(number))
    assert tracker.load("p0") == tracker.load("d0") == NOTHING
    assert tracker.num_attempts == 0


def test_the_first_token_ends_the_queue_but_not_the_request() -> None:
    tracker = LoadTracker(Clock())
    tracker.sent(ticket(0), {"u0": PREFILL + DECODE})
    tracker.first_token(ticket(0))
    assert tracker.load("u0") == NodeLoad(0, 10, 2)


def test_a_status_from_before_the_node_took_the_job_does_not_show_it() -> None:
    clock = Clock()
    tracker = LoadTracker(clock)
    tracker.sent(ticket(0), {"p0": PREFILL})
    asked_at = clock()
    tracker.taken(ticket(0), "p0")
    tracker.observed(status("p0"), taken_at=asked_at)
    assert tracker.load("p0") == PREFILL
    tracker.observed(status("p0"), taken_at=clock())
    assert tracker.load("p0") == NOTHING


def test_an_older_status_changes_nothing() -> None:
    clock = Clock()
    tracker = LoadTracker(clock)
    tracker.sent(ticket(0), {"p0": PREFILL})
    tracker.taken(ticket(0), "p0")
    tracker.observed(status("p0"), taken_at=clock())
    tracker.observed(status("p0"), taken_at=0.0)
    assert tracker.load("p0") == NOTHING


def test_blocks_are_promised_until_the_status_shows_them_used() -> None:
    """Three jobs: one has its blocks, two are in the intake until their prefill starts."""
    clock = Clock()
    tracker = LoadTracker(clock)
    for number in range(3):
        tracker.sent(
            ticket(number), {"p0": PREFILL, "d0": NodeLoad(blocks=10 + number, requests=1)}
        )
        tracker.taken(ticket(number), "d0")
    tracker.observed(status("d0", num_intake=2, num_skipped_waiting=1), taken_at=clock())
    assert tracker.load("d0") == NodeLoad(blocks=11 + 12)
    tracker.first_token(ticket(1))
    assert tracker.load("d0") == NodeLoad(blocks=11 + 12)  # not in that status still
    tracker.observed(status("d0", num_intake=1, num_skipped_waiting=2), taken_at=clock())
    assert tracker.load("d0") == NodeLoad(blocks=12)


def test_a_first_token_may_overtake_the_answer_to_the_call() -> None:
    clock = Clock()
    tracker = LoadTracker(clock)
    tracker.sent(ticket(0), {"p0": PREFILL})
    tracker.first_token(ticket(0))
    tracker.observed(status("p0"), taken_at=clock())
    tracker.taken(ticket(0), "p0")
    assert tracker.load("p0") == NOTHING
    tracker.ended(ticket(0))


def test_a_lost_node_takes_its_load_with_it() -> None:
    tracker = LoadTracker(Clock())
    tracker.sent(ticket(0), {"p0": PREFILL, "d0": DECODE})
    tracker.forget_node("p0")
    assert tracker.load("p0") == NOTHING
    tracker.first_token(ticket(0))
    tracker.taken(ticket(0), "p0")
    tracker.ended(ticket(0))
    assert tracker.load("d0") == NOTHING


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "take", "reserve", "first", "end", "look"]), st.integers(0, 9)
    )
)


@given(STEPS)
def test_status_and_load_together_are_the_truth(steps: list[tuple[str, int]]) -> None:
    """A node that serves in order, its photographs, and a router that is its only caller.

    What the status shows plus the load is never less than what the node has or is about to
    get, and exactly that when the photograph is fresh.
    """
    clock = Clock()
    tracker = LoadTracker(clock)
    travelling: list[int] = []
    waiting: list[int] = []  # without blocks
    reserved: list[int] = []
    started: list[int] = []  # have their first token
    num_sent, shown_blocks, shown_requests = 0, 0, 0
    for step, choice in steps:
        if step == "send":
            tracker.sent(ticket(num_sent), {"d0": DECODE})
            travelling.append(num_sent)
            num_sent += 1
        elif step == "take" and travelling:
            waiting.append(travelling.pop(0))
            tracker.taken(ticket(waiting[-1]), "d0")
        elif step == "reserve" and waiting:
            reserved.append(waiting.pop(0))
        elif step == "first" and reserved:
            started.append(reserved.pop(choice % len(reserved)))
            tracker.first_token(ticket(started[-1]))
        elif step == "end" and started:
            tracker.ended(ticket(started.pop(choice % len(started))))
        elif step == "look":
            num_running = len(reserved) + len(started)
            shown_requests, shown_blocks = len(waiting) + num_running, 10 * num_running
            photograph = status("d0", num_intake=len(waiting), num_running=num_running)
            tracker.observed(photograph, taken_at=clock())
        load = tracker.load("d0")
        num_requests = len(travelling) + len(waiting) + len(reserved) + len(started)
        assert shown_requests + load.requests >= num_requests
        assert shown_blocks + load.blocks >= 10 * num_requests
        if step == "look":
            assert shown_requests + load.requests == num_requests
            assert shown_blocks + load.blocks == 10 * num_requests
