"""The order of waiting requests, and that a step looks at few of them, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import SamplingParams
from scheduler import ModelRunnerOutput, Policy, Request, RequestStatus, Scheduler, Wait
from scheduler.queue import FcfsQueue, PriorityQueue, RequestQueue, SkippedQueue
from tests.scheduler.small_scheduler import RemotePrefill, add, make, request, run

quick = settings(max_examples=150, deadline=None, derandomize=True)

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "put_back", "remove", "take"]), st.integers(0, 99)),
    max_size=40,
)


def numbered(number: int) -> Request:
    """Ids compare as strings: r10 is before r9."""
    return Request(
        f"r{number}",
        [1],
        SamplingParams(),
        priority=number % 3,
        arrival_time=float(number % 4),
    )


def play(queue: RequestQueue, operations: list[tuple[str, int]]) -> Iterator[tuple[str, Request]]:
    """Do them to the queue, and say what was done to whom."""
    members: list[Request] = []
    for number, (name, choice) in enumerate(operations):
        if name in ("add", "put_back"):
            one = numbered(number)
            (queue.add if name == "add" else queue.put_back)(one)
            members.append(one)
        elif members:
            one = queue.peek() if name == "take" else members[choice % len(members)]
            queue.remove(one)
            members.remove(one)
            assert one not in queue
            name = "remove"
        else:
            continue
        yield name, one


@quick
@given(OPERATIONS)
def test_first_come_first_served(operations: list[tuple[str, int]]) -> None:
    queue, wanted = FcfsQueue(), list[Request]()
    for name, one in play(queue, operations):
        match name:
            case "add":
                wanted.append(one)
            case "put_back":
                wanted.insert(0, one)
            case _:
                wanted.remove(one)
        assert list(queue) == wanted
        assert len(queue) == len(wanted)
        assert all(member in queue for member in wanted)
        assert not wanted or queue.peek() is wanted[0]


@quick
@given(OPERATIONS)
def test_the_most_urgent_first(operations: list[tuple[str, int]]) -> None:
    queue, wanted = PriorityQueue(), set[Request]()
    for name, one in play(queue, operations):
        (wanted.discard if name == "remove" else wanted.add)(one)
        in_order = sorted(wanted, key=lambda r: (r.priority, r.arrival_time, r.request_id))
        assert list(queue) == in_order
        assert len(queue) == len(wanted)
        assert all(member in queue for member in wanted)
        assert not wanted or queue.peek() is in_order[0]


WAITS = [Wait.REMOTE_KVS, Wait.LORA, Wait.PARKING, Wait.TURN]


@quick
@given(
    policy=st.sampled_from(["fcfs", "priority"]),
    operations=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([*WAITS, *WAITS, None])), max_size=40
    ),
    closed=st.sets(st.sampled_from(WAITS)),
    adapters=st.sets(st.sampled_from(["lora-0", "lora-1"])),
)
def test_those_that_were_passed_over(
    policy: Policy,
    operations: list[tuple[int, Wait | None]],
    closed: set[Wait],
    adapters: set[str],
) -> None:
    """A request keeps its place whatever it waits for; None takes it out."""
    requests = [
        Request(f"r{n}", [1], SamplingParams(), priority=n % 2, lora_name=f"lora-{n % 3}")
        for n in range(13)
    ]
    queue = SkippedQueue(policy)
    wanted: dict[Request, Wait] = {}

    def is_open(wait: Wait, lora_name: str | None) -> bool:
        return lora_name in adapters if wait is Wait.LORA else wait not in closed

    for number, wait in operations:
        one = requests[number]
        if wait is not None:
            queue.put(one, wait)
            wanted[one] = wait
        elif one in wanted:
            queue.remove(one)
            del wanted[one]
        in_order = list(wanted)
        if policy == "priority":
            in_order.sort(key=lambda r: r.urgency)
        assert list(queue) == in_order
        assert len(queue) == len(wanted)
        assert all((r in queue) == (r in wanted) for r in requests)
        assert all(queue.waits_for(r) is w for r, w in wanted.items())
        assert queue.in_order(reversed(in_order)) == in_order
        for each in (Wait.REMOTE_KVS, Wait.PARKING, Wait.TURN):
            assert queue.waiting_for(each) == [r for r in in_order if wanted[r] is each]
        openly = [r for r in in_order if is_open(wanted[r], r.lora_name)]
        assert queue.first(is_open) is (openly[0] if openly else None)


# ------------------------------------------------------------------ how many are looked at


class Counted(Request):
    """Notes that somebody looked at the request while it was waiting."""

    __slots__ = ()
    seen: frozenset[str] | set[str] = frozenset()

    def __getattribute__(self, name: str) -> object:
        seen = Counted.seen
        if isinstance(seen, set) and name != "__class__":
            seen.add(object.__getattribute__(self, "request_id"))
        return object.__getattribute__(self, name)


@contextmanager
def looking() -> Iterator[set[str]]:
    """The ids of all counted requests at which somebody looks meanwhile."""
    Counted.seen = seen = set[str]()
    try:
        yield seen
    finally:
        Counted.seen = frozenset()


def counted(number: int, length: int = 4, **fields: object) -> Request:
    return Counted(
        f"w{number}",
        [10 + number % 900, *range(10, 9 + length)],
        SamplingParams(max_tokens=100),
        arrival_time=float(number),
        hash_block_size=4,
        **fields,  # type: ignore[arg-type]
    )


@dataclass
class Case:
    """Why nobody is admitted."""

    settings: dict[str, object]
    length: int = 4
    fields: Callable[[int], dict[str, object]] = field(default=lambda number: {})
    remote: bool = False
    num_blocks: int = 100
    running: int = 30  # tokens in the prompt of the one that runs
    wait: Wait | None = None


MANY = 4_000  # requests, of which a step may look at a handful
MANY_TOKENS: dict[str, object] = {"max_num_batched_tokens": 2000, "max_model_len": 400}
CASES = {
    "no seat": Case({"max_num_seqs": 1}, wait=Wait.SEAT),
    "does not fit": Case(MANY_TOKENS, length=390, wait=Wait.BLOCKS),
    "no budget": Case({"max_num_batched_tokens": 4}, running=60, wait=Wait.TOKENS),
    "no adapter": Case(
        MANY_TOKENS | {"max_loras": 1}, fields=lambda n: {"lora_name": f"lora-{n % 5}"}
    ),
    "no grammar": Case({}, fields=lambda n: {"awaits_grammar": True}),
    "remote KV": Case({}, remote=True, num_blocks=5 * MANY),
    "parking": Case({"max_parked_blocks": 1}, remote=True),
    "partial prefill": Case(
        {
            "max_num_partial_prefills": 1,
            "long_prefill_token_threshold": 3,
            "max_num_batched_tokens": 100,
            "max_model_len": 400,
        },
        length=8,
        running=200,
    ),
    "long prefill": Case(
        {
            "max_long_partial_prefills": 1,
            "long_prefill_token_threshold": 3,
            "max_num_batched_tokens": 100,
            "max_model_len": 400,
        },
        length=8,
        running=200,
    ),
}
_MOST = 6  # a head or two of `waiting`, and one for each group of those passed over


def waiting_many(case: Case, number: int, policy: Policy) -> Scheduler:
    """After two steps: in the first, all may have to be passed over one by one."""
    connector = RemotePrefill(remote={f"w{n}" for n in range(number)} if case.remote else set())
    scheduler = make(case.num_blocks, connector, policy=policy, **case.settings)  # type: ignore[arg-type]
    add(scheduler, request("runs", case.running, 300, lora_name="mine", priority=-1))
    add(scheduler, *(counted(n, case.length, **case.fields(n)) for n in range(number)))
    for _ in range(2):
        step = scheduler.schedule()
        at_its_end = scheduler.requests["runs"].num_output_placeholders
        sampled = {"runs": [7]} if at_its_end else {}
        scheduler.update_from_output(step, ModelRunnerOutput(sampled))
    return scheduler


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_looks_at_few_however_many_wait(name: str, policy: Policy) -> None:
    case, looked_at = CASES[name], list[int]()
    for number in (10, 400, MANY):
        scheduler = waiting_many(case, number, policy)
        with looking() as seen:
            step = scheduler.schedule()
        assert list(step.num_scheduled_tokens) == ["runs"]
        assert step.admission_ended_by is case.wait
        looked_at.append(len(seen))
    assert max(looked_at) <= _MOST, looked_at


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("passed_over", [False, True])
def test_aborting_one_looks_at_few_others(policy: Policy, passed_over: bool) -> None:
    fields = {"awaits_grammar": True} if passed_over else {}
    scheduler = make(10, policy=policy, max_num_seqs=1)
    add(scheduler, request("runs", 4, priority=-1))
    add(scheduler, *(counted(n, **fields) for n in range(MANY)))
    run(scheduler)
    one = f"w{MANY - 700}"
    with looking() as seen:
        scheduler.finish_requests([one], RequestStatus.FINISHED_ABORTED)
    assert seen == {one}
    scheduler.check_integrity()
