"""A YAML file that people write: every mistake in it is told by file, line and key.

Knows YAML and pydantic, and nothing of what a particular file is for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from cluster.yaml_problem import Place, describe, dotted, shown
from protocol import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)


def load_yaml(path: Path, model: type[ModelT]) -> ModelT:
    """What the file at `path` says, checked.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not what `model` asks for. One
            line for each mistake: `path:line: dotted.key: what is allowed`.
    """
    return YamlFile.read(path).parse(model)


@dataclass(frozen=True)
class YamlFile:
    """What a file holds, and where in it that stands."""

    path: Path
    root: yaml.MappingNode
    values: dict[Any, Any]

    @classmethod
    def read(cls, path: Path) -> YamlFile:
        """Raises ConfigError: it cannot be read, is not YAML, or says one thing twice."""
        text = _read_text(path)
        try:
            loader = _Loader(text)
            root = loader.get_single_node()
            if not isinstance(root, yaml.MappingNode):
                what = "nothing" if root is None else shown(root.value)
                raise ConfigError(f"{path}:1", f"must hold keys with values, not {what}")
            # Before there are values: in them the second of two equal keys has won.
            _refuse([f"{path}:{line}: {problem}" for line, problem in sorted(_duplicates(root))])
            return cls(path, root, loader.construct_document(root))
        except yaml.MarkedYAMLError as error:
            raise _syntax_error(path, error) from error
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(f"{path}:{line}", f"is not YAML: {error.reason}") from error
        except RecursionError as error:
            raise ConfigError(str(path), "is nested too deeply") from error

    def parse(self, model: type[ModelT]) -> ModelT:
        """Raises ConfigError: the values are not what `model` asks for."""
        try:
            with self.locating():
                return model.model_validate(self.values)
        except ValidationError as error:
            found = [describe(one, model, self._found) for one in error.errors()]
            found.sort(key=lambda problem: self._line(problem[0]))
            _refuse([f"{self._where(place)}: {problem}" for place, problem in found])
            raise

    @contextlib.contextmanager
    def locating(self) -> Iterator[None]:
        """A ConfigError raised inside that names a key of this file tells where that stands.

        Its field may be dotted; otherwise the first such key is meant. An error that names no key
        of the file is left as it is.
        """
        try:
            yield
        except ConfigError as error:
            place = self._find(tuple(error.field.replace("-", "_").split(".")))
            if place is None:
                raise
            raise self.error(place, error.problem) from error

    def error(self, place: Place, problem: str) -> ConfigError:
        """About what is at `place`, or is missing there."""
        return ConfigError(self._where(place), problem)

    def _find(self, ending: Place) -> Place | None:
        places = (place for place, _ in _nodes(self.root))
        return next((place for place in places if place[-len(ending) :] == ending), None)

    def _found(self, place: Place) -> Place:
        """Those steps of `place` that there are in the file."""
        return tuple(step for step, _ in _ways(self.root, place))

    def _where(self, place: Place) -> str:
        where = f"{self.path}:{self._line(place)}"
        return f"{where}: {dotted(place)}" if place else where

    def _line(self, place: Place) -> int:
        """Of what is not there, it is the line of what should hold it."""
        return [1, *(line for _, line in _ways(self.root, place))][-1]


# ---------------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """The safe loader, whose every complaint has a line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError) as error:  # of int(), date() and tables of names
            kind = str(node.tag).rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(node.value)} is not a valid {kind}", node.start_mark
            ) from error


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(str(path), "there is no such file") from error
    except IsADirectoryError as error:
        raise ConfigError(str(path), "is a directory, not a file") from error
    except (OSError, ValueError) as error:  # the second one for names with a null byte
        reason = getattr(error, "strerror", error)
        raise ConfigError(str(path), f"cannot be read: {reason}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}", "is not text in UTF-8") from error


def _syntax_error(path: Path, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    words = ", ".join(words for words in (error.context, error.problem) if words)
    return ConfigError(where, f"is not YAML: {' '.join(words.split())}")


def _refuse(lines: list[str]) -> None:
    """Raise one error of all these lines, each `where: what`, if there are any."""
    if lines:
        # Of several types that a value may have, each one complains.
        where, _, what = "\n".join(dict.fromkeys(lines)).partition(": ")
        raise ConfigError(where, what)


# ------------------------------------------------------------------------ nodes


def _ways(node: yaml.Node, place: Place) -> Iterator[tuple[str | int, int]]:
    """Each step of `place` that there is, and the line of its key or item."""
    for step in place:
        entry = _entry(node, step)
        if entry is not None:
            line, node = entry
            yield step, line


def _entry(node: yaml.Node, step: str | int) -> tuple[int, yaml.Node] | None:
    match node, step:
        case yaml.SequenceNode(), int() if step < len(node.value):
            return _line(node.value[step]), node.value[step]
        case yaml.MappingNode(), _:
            # From the end: what a mapping says itself comes after what it merges, and wins.
            for key, value in reversed(node.value):
                if key.value == str(step):
                    return _line(key), value
    return None


def _nodes(root: yaml.Node) -> Iterator[tuple[Place, yaml.Node]]:
    """Each value and where it stands, in the order of the file; behind an alias only once."""
    seen: set[int] = set()
    rest: list[tuple[Place, yaml.Node]] = [((), root)]
    while rest:
        place, node = rest.pop()
        yield place, node
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            rest += [((*place, str(key.value)), value) for key, value in reversed(node.value)]
        elif isinstance(node, yaml.SequenceNode):
            rest += [((*place, index), item) for index, item in reversed([*enumerate(node.value)])]


def _duplicates(root: yaml.Node) -> Iterator[tuple[int, str]]:
    """The line and the problem of each key that stands twice in one mapping."""
    for place, node in _nodes(root):
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name = (str(key.tag), str(key.value))
            if name in lines:
                where = dotted((*place, name[1]))
                yield _line(key), f"{where}: stands here twice, first in line {lines[name]}"
            lines.setdefault(name, _line(key))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
