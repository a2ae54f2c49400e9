"""A recording that is changed in one place, anywhere, is different, and the replay says where."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import pytest

from scheduler.observation import AFTER_DEFAULTS, EXPECT_DEFAULTS
from scheduler.replay import Difference, Replay, load, replay
from scheduler.trace import Trace
from tests.scheduler.recordings import SHIPPED, recorded_trace
from tests.scheduler.test_random_life import random_world

NAMES = (
    *("aborts_01", "chunked_mix_01", "fcfs_preempt_cache_01", "lora_limit_01"),
    *("priority_preempt_01", "priority_ties_01", "shared_prefix_01", "stop_min_tokens_01"),
    *(
        "remote_async_01",
        "remote_async_02",
        "remote_fail_fail_01",
        "remote_fail_recompute_01",
        "remote_none_01",
    ),
    *("remote_send_01", "remote_sync_01"),
    *("spec_draft_01", "spec_eagle_01", "spec_ngram_01", "spec_priority_tight_01"),
)
LIVES = ((3, 1), (4, 1), (5, 2), (9, 2), (11, 2))  # seed, steps in flight
MAX_STEPS = 60  # what is replayed of each
NUM_LEAVES, NUM_EDITS, NUM_EACH = 1500, 400, 6
UNKNOWN: Any = "something else"

Path = tuple[Any, ...]


@cache
def traces() -> dict[str, Trace]:
    found = {name: load(SHIPPED[name]) for name in NAMES}
    for seed, in_flight in LIVES:
        found[f"life_{seed}_{in_flight}"] = recorded_trace(random_world(seed, in_flight=in_flight))
    for trace in found.values():
        del trace.steps[MAX_STEPS:]
        assert replay(trace, exact_blocks=True) is None
    return found


@dataclass(frozen=True)
class Place:
    """Somewhere in what was recorded of a step: `path` begins with the name of a field."""

    trace: str
    step: int
    section: str
    path: Path = ()

    def at(self, *path: Any) -> Place:
        return replace(self, path=path)

    @property
    def field(self) -> str:
        return f"{self.section}.{self.path[0]}"

    def recorded(self) -> dict[str, Any]:
        section: dict[str, Any] = getattr(traces()[self.trace].steps[self.step], self.section)
        return section

    def replay_with(self, section: dict[str, Any]) -> object:
        """Until then, whatever the names of blocks."""
        trace = traces()[self.trace]
        steps = trace.steps[: self.step + 1]
        steps[-1] = msgspec.structs.replace(steps[-1], **{self.section: section})
        return replay(msgspec.structs.replace(trace, steps=steps))


class Edits:
    """Changes, each of one field, and whether a replay notices all of them and nothing else.

    What is compared has no influence on how a replay goes on. So it is enough to replay a trace
    once for all fields that are changed in it, and again for those that are changed again.
    """

    def __init__(self) -> None:
        self._rounds: defaultdict[str, list[dict[Place, dict[str, Any]]]] = defaultdict(list)

    def add(self, place: Place, section: dict[str, Any]) -> None:
        """`section` is that of the place, with another value of its field, or without it."""
        name, rounds = place.path[0], self._rounds[place.trace]
        field = place.at(name)
        changes = next((changes for changes in rounds if field not in changes), None)
        if changes is None:
            rounds.append(changes := {})
        changes[field] = {name: copy.deepcopy(section[name])} if name in section else {}

    def check_noticed(self) -> None:
        for name, rounds in self._rounds.items():
            for changes in rounds:
                run = Replay(_changed(traces()[name], changes), exact_blocks=True)
                noticed = {(found.step, found.field) for found in run.differences()}
                assert noticed == {(place.step, place.field) for place in changes}, name


def _changed(trace: Trace, changes: dict[Place, dict[str, Any]]) -> Trace:
    steps = list(trace.steps)
    for place, field in changes.items():
        (name,) = place.path
        there = getattr(steps[place.step], place.section)
        now = {n: value for n, value in there.items() if n != name} | field
        steps[place.step] = msgspec.structs.replace(steps[place.step], **{place.section: now})
    return msgspec.structs.replace(trace, steps=steps)


def sections() -> Iterator[Place]:
    for name, trace in traces().items():
        for number, step in enumerate(trace.steps):
            for section in ("expect", "after"):
                if getattr(step, section) is not None:
                    yield Place(name, number, section)


def walk(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """All that is in it, with the way there."""
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from walk(inner, (*path, index))


def edited(section: dict[str, Any], path: Path) -> tuple[dict[str, Any], Any, Any]:
    """A copy, what holds the end of the path in it, and the last part of the path."""
    changed = copy.deepcopy(section)
    holder: Any = changed
    for part in path[:-1]:
        holder = holder[part]
    return changed, holder, path[-1]


def sample(places: Iterable[Place], number: int) -> list[Place]:
    """So many, and some of each field."""
    by_field: defaultdict[str, list[Place]] = defaultdict(list)
    for place in places:
        by_field[place.field].append(place)
    rng = random.Random(number)
    chosen = {p for some in by_field.values() for p in rng.sample(some, min(NUM_EACH, len(some)))}
    rest = [place for some in by_field.values() for place in some if place not in chosen]
    return [*chosen, *rng.sample(rest, max(0, number - len(chosen)))]


@cache
def leaves() -> list[Place]:
    return [
        section.at(*path)
        for section in sections()
        for path, value in walk(section.recorded())
        if not isinstance(value, dict | list)
    ]


def all_fields() -> set[str]:
    """Each has defaults, or is in each recorded step."""
    steps = [step for trace in traces().values() for step in trace.steps]
    expect = set(EXPECT_DEFAULTS).union(*(step.expect or {} for step in steps))
    after = set(AFTER_DEFAULTS).union(*(step.after or {} for step in steps))
    return {f"expect.{name}" for name in expect} | {f"after.{name}" for name in after}


def other(value: object) -> object:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "'"
    raise AssertionError(value)


def test_every_number_and_every_word() -> None:
    chosen = sample(leaves(), NUM_LEAVES)
    fields = Counter(place.field for place in chosen)
    assert fields.keys() == all_fields()
    assert sum(fields.values()) >= NUM_LEAVES
    assert {place.trace for place in chosen} == traces().keys()
    edits = Edits()
    for place in chosen:
        section, holder, last = edited(place.recorded(), place.path)
        holder[last] = other(holder[last])
        edits.add(place, section)
    edits.check_noticed()


def places_of(kind: type) -> list[Place]:
    """Of collections that have members."""
    return [
        section.at(*path)
        for section in sections()
        for path, value in walk(section.recorded())
        if path and isinstance(value, kind) and value
    ]


def test_every_id_that_something_is_recorded_for() -> None:
    edits = Edits()
    for place in sample(places_of(dict), NUM_EDITS):
        section, holder, last = edited(place.recorded(), place.path)
        values: dict[str, Any] = holder[last]
        key = random.Random(repr(place)).choice(list(values))
        holder[last] = {other(k) if k == key else k: v for k, v in values.items()}
        edits.add(place, section)
        holder[last] = {k: v for k, v in values.items() if k != key}
        edits.add(place, section)
        holder[last] = values | {"nobody": next(iter(values.values()))}
        edits.add(place, section)
    edits.check_noticed()


def test_every_member_of_a_list_and_their_order() -> None:
    edits, num_swapped = Edits(), 0
    for place in sample(places_of(list), NUM_EDITS):
        section, holder, last = edited(place.recorded(), place.path)
        values: list[Any] = holder[last]
        index = random.Random(repr(place)).randrange(len(values))
        holder[last] = values[:index] + values[index + 1 :]
        edits.add(place, section)
        holder[last] = [*values, values[index]]
        edits.add(place, section)
        before, one, two = values[: index - 1], values[index - 1], values[index]
        if index and one != two:
            holder[last] = [*before, two, one, *values[index + 1 :]]
            edits.add(place, section)
            num_swapped += 1
    edits.check_noticed()
    assert num_swapped > NUM_EDITS / 4


def test_every_field() -> None:
    """One that is gone, of another type, or not known."""
    tops = [section.at(name) for section in sections() for name in section.recorded()]
    edits = Edits()
    for place in sample(tops, NUM_EDITS):
        recorded, name = place.recorded(), place.path[0]
        edits.add(place, {n: v for n, v in recorded.items() if n != name})
        for wrong in (None, UNKNOWN):
            edits.add(place, recorded | {name: wrong})
        unknown = place.at(f"{name}_more")
        edits.add(unknown, recorded | {unknown.path[0]: recorded[name]})
    edits.check_noticed()


def test_results_of_no_step() -> None:
    trace = traces()["chunked_mix_01"]
    step = msgspec.structs.replace(trace.steps[0], runner=None)
    found = replay(msgspec.structs.replace(trace, steps=[step]))
    assert isinstance(found, Difference)
    assert (found.step, found.field) == (0, "after")


@pytest.mark.parametrize("section", ["expect", "after"])
def test_a_step_of_which_nothing_is_recorded(section: str) -> None:
    trace = traces()["chunked_mix_01"]
    steps = list(trace.steps)
    steps[3] = msgspec.structs.replace(steps[3], **{section: {}})
    found = replay(msgspec.structs.replace(trace, steps=steps))
    assert isinstance(found, Difference)
    assert (found.step, found.field.partition(".")[0]) == (3, section)


# ------------------------------------------------------------------------------ names of blocks

TABLES = ("block_ids", "appended_block_ids")


def renamed(trace: Trace, names: dict[int, int]) -> Trace:
    def other_names(tables: dict[str, list[int]]) -> dict[str, list[int]]:
        return {i: [names.get(b, b) for b in table] for i, table in tables.items()}

    steps = []
    for step in trace.steps:
        expect, runner = step.expect, step.runner
        assert expect is not None
        expect = expect | {name: other_names(expect[name]) for name in TABLES if name in expect}
        if runner is not None:
            invalid = [names.get(b, b) for b in runner.invalid_block_ids]
            runner = msgspec.structs.replace(runner, invalid_block_ids=invalid)
        steps.append(msgspec.structs.replace(step, expect=expect, runner=runner))
    return msgspec.structs.replace(trace, steps=steps)


@pytest.mark.parametrize("name", ["fcfs_preempt_cache_01", "remote_fail_recompute_01"])
def test_blocks_may_have_other_names_but_not_exactly(name: str) -> None:
    trace = traces()[name]
    usable = range(1, trace.config.num_blocks_including_null)
    shuffled = random.Random(name).sample(usable, len(usable))
    other_names = renamed(trace, dict(zip(usable, shuffled, strict=True)))
    assert replay(other_names) is None
    found = replay(other_names, exact_blocks=True)
    assert isinstance(found, Difference)
    assert found.field == "expect.block_ids"
    one_for_two = renamed(trace, dict.fromkeys(usable, 1))
    assert replay(one_for_two) is not None


def test_one_other_block_goes_unnoticed_only_if_that_is_another_name() -> None:
    blocks = [place for place in leaves() if place.path[0] in TABLES]
    num_unnoticed = 0
    for place in random.Random(0).sample(blocks, 200):
        section, holder, last = edited(place.recorded(), place.path)
        holder[last] += 1
        found = place.replay_with(section)
        if found is not None:
            assert isinstance(found, Difference)
            assert (found.step, found.field) == (place.step, place.field)
            continue
        num_unnoticed += 1
        assert is_renaming(place, section), place
    assert 0 < num_unnoticed < 100


def is_renaming(place: Place, section: dict[str, Any]) -> bool:
    """Whether each block has one other name throughout, which no other block has."""
    pairs = set()
    for number, step in enumerate(traces()[place.trace].steps[: place.step + 1]):
        recorded = step.expect or {}
        changed = section if number == place.step else recorded
        for name in TABLES:
            for request_id, table in recorded.get(name, {}).items():
                pairs |= set(zip(table, changed[name][request_id], strict=True))
    return len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)
