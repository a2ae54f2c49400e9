"""Connectors of a user's own, named in the configuration as `module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import cast

from kv_transfer.connector import KVConnector
from protocol import ConfigError, Role

_FIELD = "connectors"


@dataclass(frozen=True)
class ConnectorContext:
    """The one argument that the class is called with."""

    node_id: str
    role: Role
    block_size: int  # tokens
    fingerprint: str  # of the model
    options: Mapping[str, object]  # as they stand in the configuration


def load_connector(spec: str, context: ConnectorContext) -> KVConnector:
    """An object of the class `module:Class`, which must be importable.

    Raises:
        ConfigError: there is no such module or class, it is no connector, or it cannot be made.
    """
    cls = _find_class(spec)
    missing = [name for name in _members() if not hasattr(cls, name)]
    if missing:
        raise _wrong(spec, f"is no connector, it lacks {', '.join(missing)}")
    try:
        connector = cls(context)
    except ConfigError:
        raise  # it says itself which option is wrong
    except Exception as error:  # whatever foreign code may raise
        raise _wrong(spec, f"could not be made: {_told(error)}") from error
    return cast("KVConnector", connector)


def _find_class(spec: str) -> type:
    module_name, colon, class_name = spec.partition(":")
    if not (colon and _is_dotted_name(module_name) and class_name.isidentifier()):
        raise _wrong(spec, "must have the form module:Class")
    found = getattr(_import(spec, module_name), class_name, None)
    if found is None:
        raise _wrong(spec, f"module {module_name} has no class {class_name}")
    if not isinstance(found, type):
        raise _wrong(spec, f"is no class, but {type(found).__name__}")
    return found


def _import(spec: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise _wrong(spec, f"there is no module {error.name} on the path") from error
        raise _wrong(spec, f"{module_name} needs a module {error.name}") from error
    except Exception as error:  # whatever foreign code may raise
        raise _wrong(spec, f"{module_name} cannot be imported: {_told(error)}") from error


def _is_dotted_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _members() -> list[str]:
    """Of both sides of a connector."""
    return [name for name in dir(KVConnector) if not name.startswith("_")]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _wrong(spec: str, problem: str) -> ConfigError:
    return ConfigError(_FIELD, f"{spec}: {problem}")
