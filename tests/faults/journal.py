"""What went wrong, as the transports of all nodes have written it down."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec


class Entry(msgspec.Struct, frozen=True):
    node: str
    kind: str
    of: str
    ticket: str


_decoder = msgspec.json.Decoder(Entry)


def entries(journal: Path) -> list[Entry]:
    if not journal.exists():
        return []
    return [_decoder.decode(line) for line in journal.read_bytes().splitlines()]


def counts(journal: Path) -> Counter[str]:
    """How often each kind of fault came."""
    return Counter(entry.kind for entry in entries(journal))
