"""What is not to be seen."""

from __future__ import annotations

import msgspec


class Secret(msgspec.Struct, frozen=True):
    """Text that is not shown."""

    value: str

    def __repr__(self) -> str:
        return "Secret(…)"
