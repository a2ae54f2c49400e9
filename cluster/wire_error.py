"""Errors on their way from one process to another: the same class with the same fields."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol import KvrelayError, RequestFailed

FieldValue = str | int | float | bool | None | tuple[str, ...]

_TIMEOUT = "timeout"  # of Python's TimeoutError, which nodes raise where a step takes too long


class WireError(msgspec.Struct, frozen=True):
    """An error of our tree, or a TimeoutError."""

    label: str
    message: str
    fields: dict[str, FieldValue]

    @classmethod
    def of(cls, error: KvrelayError | TimeoutError) -> WireError:
        if isinstance(error, KvrelayError):
            return cls(error.label, str(error), vars(error))
        return cls(_TIMEOUT, str(error), {})

    def restored(self) -> KvrelayError | TimeoutError:
        """The error that was sent. Of a class that is unknown here, it has failed a request."""
        if self.label == _TIMEOUT:
            return TimeoutError(self.message)
        kind = _classes().get(self.label, RequestFailed)
        # Not by the constructor: each has its own, and makes the message from its arguments.
        error = kind.__new__(kind, self.message)
        vars(error).update(self.fields)
        return error


def _classes() -> dict[str, type[KvrelayError]]:
    """Of the whole tree, by label; of those that share one, the class that is highest in it."""
    found: dict[str, type[KvrelayError]] = {}
    rest: list[type[Any]] = [KvrelayError]
    for kind in rest:
        found.setdefault(kind.label, kind)
        rest += kind.__subclasses__()
    return found
