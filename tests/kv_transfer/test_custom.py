"""A connector named as `module:Class`, and what is said of one that is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_transfer import BaseConnector, ConnectorContext, load_connector
from protocol import ConfigError, Role

CONTEXT = ConnectorContext("decode-0", Role.DECODE, 16, "fingerprint", {"size": 3})
_NUMBERS = itertools.count()

MINIMAL = """
from kv_transfer import BaseConnector
class Mine(BaseConnector):
    def __init__(self, context):
        self.context = context
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Puts a module on the path, with a name that no other test has."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"custom_connector_{next(_NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def problem(spec: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_connector(spec, CONTEXT)
    assert caught.value.field == "connectors"
    assert caught.value.problem.startswith(f"{spec}: ")
    return caught.value.problem.removeprefix(f"{spec}: ")


def test_it_is_made_with_its_context(write: Write) -> None:
    connector = load_connector(f"{write(MINIMAL)}:Mine", CONTEXT)
    assert isinstance(connector, BaseConnector)
    assert connector.context is CONTEXT  # type: ignore[attr-defined]
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)  # type: ignore[arg-type]
    assert not connector.saves_layers


def test_layers_are_told_to_whoever_overrides_the_method(write: Write) -> None:
    source = MINIMAL + "    def save_kv_layer(self, layer): pass\n"
    assert load_connector(f"{write(source)}:Mine", CONTEXT).saves_layers


@pytest.mark.parametrize("spec", ["", "module", "module:", ":Class", "a:b:C", "a b:C", "a..b:C"])
def test_a_wrong_form(spec: str) -> None:
    assert "module:Class" in problem(spec)


@pytest.mark.parametrize("module", ["no_such_module", "kv_transfer.no_such", "no_such.inner"])
def test_no_such_module(module: str) -> None:
    assert "there is no module" in problem(f"{module}:Mine")


def test_a_module_that_needs_another_one(write: Write) -> None:
    name = write("import something_not_installed")
    assert problem(f"{name}:Mine") == f"{name} needs a module something_not_installed"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: "),
        ("from kv_transfer import nothing_like_this", "ImportError: "),
    ],
)
def test_a_module_that_breaks(write: Write, source: str, told: str) -> None:
    name = write(source)
    assert problem(f"{name}:Mine").startswith(f"{name} cannot be imported: {told}")


def test_no_such_class(write: Write) -> None:
    name = write(MINIMAL + "thing = 3\n")
    assert problem(f"{name}:Other") == f"module {name} has no class Other"
    assert problem(f"{name}:thing") == "is no class, but int"


def test_no_connector(write: Write) -> None:
    name = write("class Mine:\n    def poll(self): pass\n    def shutdown(self): pass\n")
    text = problem(f"{name}:Mine")
    assert text.startswith("is no connector, it lacks build_connector_meta, get_finished, ")
    assert "start_load_kv" in text
    assert "poll" not in text
    assert "shutdown" not in text


def test_a_constructor_that_raises(write: Write) -> None:
    name = write(MINIMAL + "        raise OSError('no disk')\n")
    assert problem(f"{name}:Mine") == "could not be made: OSError: no disk"


def test_a_constructor_that_takes_something_else(write: Write) -> None:
    name = write(MINIMAL.replace("context):", "context, more):"))
    assert problem(f"{name}:Mine").startswith("could not be made: TypeError: ")


def test_an_option_that_it_finds_wrong_keeps_its_name(write: Write) -> None:
    name = write(
        "from protocol import ConfigError\n"
        + MINIMAL
        + "        raise ConfigError('size', 'is too small')\n"
    )
    with pytest.raises(ConfigError, match="size: is too small"):
        load_connector(f"{name}:Mine", CONTEXT)
