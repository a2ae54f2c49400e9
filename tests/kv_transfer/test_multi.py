"""Several connectors behave as one: whoever asks, allocates or ends does not see how many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kv_transfer import BaseConnector, MultiConnector
from protocol import KVConnectorOutput, RequestView, SamplingParams
from scheduler import Request

NUM_CHILDREN = 3
Answer = tuple[int | None, bool]


class Child(BaseConnector):
    """Answers as it is told to, and notes what it hears."""

    def __init__(self) -> None:
        self.answer: Answer = (0, False)
        self.was_asked = False
        self.allocated: int | None = None
        self.wants = False
        self.reads: list[str] = []  # requests whose blocks it reads, the youngest last
        self.revocable: set[str] = set()
        self.report = KVConnectorOutput()
        self.heard = KVConnectorOutput()

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Answer:
        self.was_asked = True
        return self.answer

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.allocated = num_external_tokens

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        if self.wants:
            self.reads.append(request.request_id)
        return self.wants

    def revoke_pin(self) -> str | None:
        for request_id in reversed(self.reads):
            if request_id in self.revocable:
                self.reads.remove(request_id)
                return request_id
        return None

    def send(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """These are read, as far as it reads them."""
        sent = tuple(sorted(set(request_ids).intersection(self.reads)))
        self.reads = [request_id for request_id in self.reads if request_id not in sent]
        return sent

    def get_finished(self) -> KVConnectorOutput:
        report, self.report = self.report, KVConnectorOutput()
        return report

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.heard = output


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=1))


def each(strategy: st.SearchStrategy) -> st.SearchStrategy:
    """One for each child."""
    return st.tuples(*[strategy] * NUM_CHILDREN)


some_answer = st.tuples(st.sampled_from([0, 0, None, 16, 48]), st.booleans())
some_of_all = st.lists(st.integers(0, 20).map(str))


class ManyAsOne(RuleBasedStateMachine):
    """The oracle looks into the children, and knows nothing of what is between."""

    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.children = [Child() for _ in range(NUM_CHILDREN)]
        self.multi = MultiConnector(self.children)
        self.num_ended = 0
        self.kept: set[str] = set()  # as the scheduler believes
        self.released: list[str] = []

    def _ask(self, answers: Sequence[Answer]) -> tuple[Answer, int | None]:
        """What comes out, and the number of the child that has to load."""
        for child, answer in zip(self.children, answers, strict=True):
            child.answer, child.was_asked, child.allocated = answer, False, None
        found = self.multi.get_num_new_matched_tokens(request("r"), 0)
        says_something = [n for n, answer in enumerate(answers) if answer[0] != 0]
        first = says_something[0] if says_something else None
        expected: Answer = (0, False) if first is None else answers[first]
        assert found == ((None, False) if expected[0] is None else expected)
        last_asked = NUM_CHILDREN - 1 if first is None else first
        assert [child.was_asked for child in self.children] == [
            number <= last_asked for number in range(NUM_CHILDREN)
        ]
        return found, first

    @rule(earlier=st.lists(each(some_answer), max_size=2), answers=each(some_answer))
    def admit(self, earlier: list[tuple[Answer, ...]], answers: tuple[Answer, ...]) -> None:
        """Only the last of several answers counts."""
        for before in earlier:
            self._ask(before)
        found, loader = self._ask(answers)
        if found[0] is not None:
            self.multi.update_state_after_alloc(request("r"), [1, 2, 3], found[0])
            assert [child.allocated for child in self.children] == [
                found[0] if number == loader else 0 for number in range(NUM_CHILDREN)
            ]

    @rule(target=ended, wants=each(st.booleans()), revocable=each(st.booleans()))
    def end(self, wants: tuple[bool, ...], revocable: tuple[bool, ...]) -> str:
        name = str(self.num_ended)
        self.num_ended += 1
        for child, its_wish, may_lose in zip(self.children, wants, revocable, strict=True):
            child.wants = its_wish
            if may_lose:
                child.revocable.add(name)
        assert self.multi.request_finished(request(name), [1]) == any(wants)
        if any(wants):
            self.kept.add(name)
        return name

    def _release(self, name: str) -> None:
        self.kept.remove(name)
        self.released.append(name)

    @rule(sent=each(some_of_all))
    def send(self, sent: tuple[list[str], ...]) -> None:
        for child, its in zip(self.children, sent, strict=True):
            child.report = KVConnectorOutput(finished_sending=child.send(its))
        reports = [child.report for child in self.children]
        output = self.multi.get_finished()
        for name in output.finished_sending:
            self._release(name)
        self.multi.update_connector_output(output)
        assert [child.heard for child in self.children] == reports

    @rule(name=consumes(ended))
    def send_one_after_the_other(self, name: str) -> None:
        for child in self.children:
            child.report = KVConnectorOutput(finished_sending=child.send([name]))
            for released in self.multi.get_finished().finished_sending:
                self._release(released)

    @rule()
    def revoke(self) -> None:
        name = self.multi.revoke_pin()
        if name is not None:
            self._release(name)
            return
        for child in self.children:
            others = {r for other in self.children if other is not child for r in other.reads}
            assert child.revocable.intersection(child.reads) <= others, "one would have been free"

    @invariant()
    def blocks_are_kept_as_long_as_somebody_reads_them(self) -> None:
        assert self.kept == {name for child in self.children for name in child.reads}
        assert len(set(self.released)) == len(self.released)


TestManyAsOne = ManyAsOne.TestCase
TestManyAsOne.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_first_that_has_something_loads_and_the_others_hear_of_no_tokens() -> None:
    children = [Child(), Child(), Child()]
    children[1].answer, children[2].answer = (32, True), (64, False)
    multi = MultiConnector(children)
    assert multi.get_num_new_matched_tokens(request("r"), 0) == (32, True)
    multi.update_state_after_alloc(request("r"), [1, 2], 32)
    assert [child.allocated for child in children] == [0, 32, 0]


def test_nothing_is_remembered_of_a_request_that_leaves_before_its_turn() -> None:
    children = [Child(), Child()]
    children[0].answer = (32, True)
    multi = MultiConnector(children)
    one = request("r")
    multi.get_num_new_matched_tokens(one, 0)
    assert not multi.request_finished(one, [])
    assert (multi._loader, multi._readers) == ({}, {})


def test_loads_are_merged_and_all_hear_which_blocks_are_bad() -> None:
    children = [Child(), Child()]
    children[0].report = KVConnectorOutput({"a": (7,)}, invalid_block_ids=frozenset({3}))
    children[1].report = KVConnectorOutput({"b": ()}, invalid_block_ids=frozenset({4, 5}))
    multi = MultiConnector(children)
    output = multi.get_finished()
    assert output == KVConnectorOutput({"a": (7,), "b": ()}, (), frozenset({3, 4, 5}))
    multi.update_connector_output(output)
    assert [set(child.heard.finished_recving) for child in children] == [{"a"}, {"b"}]
    assert [child.heard.invalid_block_ids for child in children] == [{3, 4, 5}] * 2


class Worker(BaseConnector):
    """Notes which part of the worker's side is called, with what."""

    def __init__(self, calls: list[tuple[object, ...]], name: str) -> None:
        self._calls = calls
        self._name = name

    def build_connector_meta(self, step: object) -> object:
        return f"orders for {self._name}"

    def start_load_kv(self, meta: object) -> None:
        self._calls.append((self._name, "start_load_kv", meta))

    def save_kv_layer(self, layer: int) -> None:
        self._calls.append((self._name, "save_kv_layer", layer))

    def wait_for_save(self) -> None:
        self._calls.append((self._name, "wait_for_save"))

    def poll(self) -> None:
        self._calls.append((self._name, "poll"))

    def shutdown(self) -> None:
        self._calls.append((self._name, "shutdown"))
        raise RuntimeError(f"{self._name} broke")


class Quiet(BaseConnector):
    """Wants no layers; has reserved blocks for the load of one request."""

    def __init__(self, reserved: str = "") -> None:
        self.reserved = reserved
        self.is_down = False

    def revoke_reservation(self, request_id: str) -> bool:
        return request_id == self.reserved

    def get_finished(self) -> KVConnectorOutput:
        return KVConnectorOutput(revoked_recving=(self.reserved,))

    def shutdown(self) -> None:
        self.is_down = True


def test_each_gets_its_own_orders_and_all_are_called() -> None:
    calls: list[tuple[object, ...]] = []
    multi = MultiConnector([Worker(calls, "a"), Quiet(), Worker(calls, "b")])
    meta = multi.build_connector_meta(None)  # type: ignore[arg-type]
    multi.start_load_kv(meta)
    multi.save_kv_layer(3)
    multi.poll()
    multi.wait_for_save()
    assert calls == [
        (name, *call)
        for call, names in {
            ("start_load_kv", "orders for a"): "a",
            ("start_load_kv", "orders for b"): "b",
            ("save_kv_layer", 3): "ab",
            ("poll",): "ab",
            ("wait_for_save",): "ab",
        }.items()
        for name in names
    ]


def test_layers_are_told_if_one_child_wants_them() -> None:
    assert MultiConnector([Quiet(), Worker([], "a")]).saves_layers
    assert not MultiConnector([Quiet(), Quiet()]).saves_layers


def test_reservations_of_any_child_are_revoked() -> None:
    multi = MultiConnector([Worker([], "a"), Quiet("r"), Quiet("s")])
    assert [multi.revoke_reservation(name) for name in "rst"] == [True, True, False]
    assert multi.get_finished().revoked_recving == ("r", "s")


def test_all_are_shut_down_though_one_breaks() -> None:
    calls: list[tuple[object, ...]] = []
    quiet = Quiet()
    multi = MultiConnector([Worker(calls, "a"), Worker(calls, "b"), quiet])
    with pytest.raises(RuntimeError, match="broke"):
        multi.shutdown()
    assert calls == [("a", "shutdown"), ("b", "shutdown")]
    assert quiet.is_down
