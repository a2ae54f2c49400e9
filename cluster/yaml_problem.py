"""What is wrong with a value in a YAML file, and what is allowed, in words for people."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

Place = tuple[str | int, ...]  # the keys and indices that lead to a value

_MAX_SHOWN = 60  # characters of a wrong value

# What is allowed, by the beginning of pydantic's type of the error; otherwise its own words do.
_ALLOWED = {
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_type": "text",
    "list_": "a list",
    "tuple_": "a list",
    "model_": "keys with values",
    "dict_": "keys with values",
    "dataclass_": "keys with values",
}


def dotted(place: Place) -> str:
    """`nodes[2].host`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in place]
    return "".join(steps).removeprefix(".")


def shown(value: object) -> str:
    """A value as it stands in a file, if it is short."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "keys with values"
        case list():
            return "a list"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def describe(
    error: ErrorDetails, model: type[BaseModel], found: Callable[[Place], Place]
) -> tuple[Place, str]:
    """Where one error of pydantic is, and what it is. `found`: those steps of a place that exist.

    The others name the type that was tried, of several that a value may have.
    """
    place = found(error["loc"])
    match error["type"]:
        case "missing":
            return (*place, error["loc"][-1]), "is missing"
        case "extra_forbidden":
            return place, _unknown(str(place[-1]), _known_keys(model, place[:-1]))
        case "invalid_key":
            key = shown(error["input"])
            return place, f"its keys must be text, but YAML takes one for {key}; put it in quotes"
    return place, _problem(error)


def _problem(error: ErrorDetails) -> str:
    allowed = next((_ALLOWED[kind] for kind in _ALLOWED if error["type"].startswith(kind)), None)
    if allowed is None:
        message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if not message.startswith("Input should be "):
            return " ".join(message.split())
        allowed = message.removeprefix("Input should be ")
    return f"must be {allowed}, not {shown(error['input'])}"


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    question = f" (did you mean {close[0]}?)" if close else ""
    return f"is unknown{question}; known are {', '.join(known)}"


# ----------------------------------------------------------- what a model allows


def _known_keys(model: type[BaseModel], place: Place) -> list[str]:
    """The keys that may stand at `place`. Asks the JSON schema, which knows types of any kind."""
    root = model.model_json_schema()
    schemas = list(_alternatives(root, root))
    for step in place:
        inner = [schema for outer in schemas for schema in _inside(outer, step)]
        schemas = [schema for outer in inner for schema in _alternatives(outer, root)]
    return [key for schema in schemas for key in schema.get("properties", ())]


def _alternatives(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that a reference or a union stands for."""
    if "$ref" in schema:
        yield from _alternatives(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
        return
    yield schema
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _alternatives(inner, root)


def _inside(schema: dict[str, Any], step: str | int) -> Iterator[dict[str, Any]]:
    inner = schema.get("items") if isinstance(step, int) else schema.get("properties", {}).get(step)
    if inner is None:
        inner = schema.get("additionalProperties")
    if isinstance(inner, dict):
        yield inner
