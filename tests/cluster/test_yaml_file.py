"""Whatever is wrong with a file is told by file, line and key, and never by a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator

from cluster.yaml_file import YamlFile, load_yaml
from protocol import ConfigError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Engine(Strict):
    num_seats: Annotated[int, Field(ge=1)] = 64
    eager: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"


class Host(Strict):
    name: str
    port: int = 80


class Garage(Strict):
    engine: Engine | None = None
    hosts: list[Host] = []
    weights: dict[str, float] = {}
    either: int | Host = 0
    even: int = 0

    @field_validator("even")
    @classmethod
    def _is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        if value > 100:
            raise ConfigError("even", "is too much for us")
        return value


Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "garage.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refused(path: Path) -> list[str]:
    """What is said about the file, each line without its path."""
    with pytest.raises(ConfigError) as caught:
        load_yaml(path, Garage)
    lines = str(caught.value).split("\n")
    assert all(line.startswith(str(path)) for line in lines)
    return [line.removeprefix(str(path)) for line in lines]


def test_a_good_file(write: Write) -> None:
    path = write(
        "# a comment\n"
        "engine: {num_seats: 8, policy: priority}\n"
        "hosts:\n  - name: ä\n  - name: b\n    port: 1\n"
        "weights: {a: 1, b: 0.5}\n"
    )
    assert load_yaml(path, Garage) == Garage(
        engine=Engine(num_seats=8, policy="priority"),
        hosts=[Host(name="ä"), Host(name="b", port=1)],
        weights={"a": 1, "b": 0.5},
    )


def test_anchors_and_merges(write: Write) -> None:
    path = write("hosts:\n  - &a {name: a, port: 1}\n  - {<<: *a, name: b}\n")
    assert load_yaml(path, Garage).hosts == [Host(name="a", port=1), Host(name="b", port=1)]


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        assert refused(tmp_path / "nope.yaml") == [": there is no such file"]

    def test_a_directory(self, tmp_path: Path) -> None:
        assert refused(tmp_path) == [": is a directory, not a file"]

    def test_below_a_file(self, write: Write) -> None:
        assert refused(write("") / "inner.yaml") == [": cannot be read: Not a directory"]

    def test_a_name_that_no_file_can_have(self) -> None:
        assert refused(Path("a\0b")) == [": cannot be read: embedded null byte"]

    def test_not_utf_8(self, write: Write) -> None:
        assert refused(write(b"even: 2\n# \xff\n")) == [":2: is not text in UTF-8"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: must hold keys with values, not nothing"),
        ("# even: 2\n", ":1: must hold keys with values, not nothing"),
        ("- even\n", ":1: must hold keys with values, not a list"),
        ("even\n", ":1: must hold keys with values, not 'even'"),
    ],
)
def test_no_mapping(write: Write, text: str, said: str) -> None:
    assert refused(write(text)) == [said]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("even: 2\nengine: {\n", 3, "expected the node content"),
        ("even: 2\n\tengine: 1\n", 2, "cannot start any token"),
        ("even: 2\n---\neven: 2\n", 2, "expected a single document"),
        ("even: *there\n", 1, "undefined alias"),
        ("even: 2\nhosts: !!python/object:os.system x\n", 2, "could not determine a constructor"),
        ("even: !!int two\n", 1, "'two' is not a valid int"),
        ("even: 2\nhosts: [2001-13-41]\n", 2, "'2001-13-41' is not a valid timestamp"),
        ("even: 2\nhosts: [!!bool maybe]\n", 2, "'maybe' is not a valid bool"),
        ("even: 2\nhosts: a\x00b\n", 2, "special characters are not allowed"),
        ("? [1]\n: 2\n", 1, "unhashable key"),
    ],
)
def test_a_mistake_in_the_syntax(write: Write, text: str, line: int, words: str) -> None:
    (said,) = refused(write(text))
    assert said.startswith(f":{line}: is not YAML: ")
    assert words in said


def test_nested_too_deeply(write: Write) -> None:
    assert refused(write("even: " + "[" * 5000)) == [": is nested too deeply"]


class TestKeysThatStandTwice:
    def test_at_the_top_and_inside(self, write: Write) -> None:
        path = write("even: 2\nhosts:\n  - name: a\n    name: b\n\neven: 4\n")
        assert refused(path) == [
            ":4: hosts[0].name: stands here twice, first in line 3",
            ":6: even: stands here twice, first in line 1",
        ]

    def test_beside_a_merge(self, write: Write) -> None:
        """What is merged may be said again, but not twice."""
        path = write("hosts:\n  - &a {name: a}\n  - <<: *a\n    name: b\n    name: c\n")
        assert refused(path) == [":5: hosts[1].name: stands here twice, first in line 4"]


KNOWN = "known are num_seats, eager, policy"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engine:\n  num_seat: 1\n",
         f":2: engine.num_seat: is unknown (did you mean num_seats?); {KNOWN}"),
        ("engine:\n  eager: true\n  colour: red\n", f":3: engine.colour: is unknown; {KNOWN}"),
        ("hosts:\n- name: a\n  prot: 1\n",
         ":3: hosts[0].prot: is unknown (did you mean port?); known are name, port"),
        ("engine: {num_seats: many}", ":1: engine.num_seats: must be a whole number, not 'many'"),
        ("engine: {num_seats: '8'}", ":1: engine.num_seats: must be a whole number, not '8'"),
        ("engine: {num_seats: 1.5}", ":1: engine.num_seats: must be a whole number, not 1.5"),
        ("engine: {num_seats: yes}", ":1: engine.num_seats: must be a whole number, not true"),
        ("engine: {num_seats: }", ":1: engine.num_seats: must be a whole number, not nothing"),
        ("engine: {num_seats: [1]}", ":1: engine.num_seats: must be a whole number, not a list"),
        ("engine: {num_seats: 0}",
         ":1: engine.num_seats: must be greater than or equal to 1, not 0"),
        ("engine: {eager: 1}", ":1: engine.eager: must be true or false, not 1"),
        ("engine: {policy: lifo}", ":1: engine.policy: must be 'fcfs' or 'priority', not 'lifo'"),
        ("engine: [1]", ":1: engine: must be keys with values, not a list"),
        ("\nhosts:\n  - port: 1\n", ":3: hosts[0].name: is missing"),
        ("hosts:\n", ":1: hosts: must be a list, not nothing"),
        ("hosts: [{name: 1}]", ":1: hosts[0].name: must be text, not 1"),
        ("weights: {a: b}", ":1: weights.a: must be a number, not 'b'"),
        ("even: 2\nengine:\n  on: 1\n",
         ":2: engine: its keys must be text, but YAML takes one for true; put it in quotes"),
        ("\neven: 3", ":2: even: must be even"),
        ("\neven: 102", ":2: even: is too much for us"),
        ("hosts: &a [*a]", ":1: hosts[0]: must be keys with values, not a list"),
    ],
)  # fmt: skip
def test_a_wrong_value(write: Write, text: str, said: str) -> None:
    assert refused(write(text)) == [said]


def test_a_long_value_is_cut(write: Write) -> None:
    (said,) = refused(write(f"even: {'x' * 500}"))
    assert len(said) < 120


def test_each_mistake_has_its_line(write: Write) -> None:
    path = write("even: x\nengine:\n  num_seats: y\n  eager: 1\nhost: 1\n")
    places = [":1: even", ":3: engine.num_seats", ":4: engine.eager", ":5: host"]
    assert [said.rpartition(": ")[0] for said in refused(path)[:3]] == places[:3]
    assert refused(path)[3].startswith(places[3])


def test_each_type_that_a_value_may_have_complains(write: Write) -> None:
    assert refused(write("either:\n  name: a\n  prot: 1\n")) == [
        ":1: either: must be a whole number, not keys with values",
        ":3: either.prot: is unknown (did you mean port?); known are name, port",
    ]


class TestErrorsOfWhatTheValuesAreFor:
    @pytest.fixture
    def file(self, write: Write) -> YamlFile:
        return YamlFile.read(
            write("engine:\n  num_seats: 1\nsmall:\n  eager: true\nother:\n  num_seats: 2\n")
        )

    @pytest.mark.parametrize(
        ("field", "said"),
        [
            ("num-seats", ":2: engine.num_seats: is wrong"),  # the first of that name
            ("other.num_seats", ":6: other.num_seats: is wrong"),
            ("small", ":3: small: is wrong"),
        ],
    )
    def test_they_tell_the_line(self, file: YamlFile, field: str, said: str) -> None:
        with pytest.raises(ConfigError) as caught, file.locating():
            raise ConfigError(field, "is wrong")
        assert str(caught.value).removeprefix(str(file.path)) == said

    @pytest.mark.parametrize("field", ["port", "small.num_seats"])
    def test_what_is_not_in_the_file(self, file: YamlFile, field: str) -> None:
        with pytest.raises(ConfigError) as caught, file.locating():
            raise ConfigError(field, "is wrong")
        assert str(caught.value) == f"{field}: is wrong"

    @pytest.mark.parametrize(
        ("place", "line"), [(("small", "num_seats"), 3), (("big", "num_seats"), 1)]
    )
    def test_what_is_missing_is_told_with_the_line_of_its_section(
        self, file: YamlFile, place: tuple[str, ...], line: int
    ) -> None:
        error = file.error(place, "is missing")
        assert str(error) == f"{file.path}:{line}: {'.'.join(place)}: is missing"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(alphabet="even: gi{}[]&*!<>|-'\"#?,\n\t\r019.~\0\x85é\ufeff") | st.binary())
def test_any_file_is_read_or_refused_in_order(write: Write, text: str | bytes) -> None:
    with contextlib.suppress(ConfigError):
        load_yaml(write(text), Garage)
