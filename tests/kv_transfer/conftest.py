from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer import MemoryHub
from tests.kv_transfer.handoff_ends import Clock, Decode, Prefill, settle


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
def p(hub: MemoryHub, clock: Clock) -> Iterator[Prefill]:
    end = Prefill(hub, "p", clock)
    yield end
    end.close()


@pytest.fixture
def d(hub: MemoryHub, clock: Clock) -> Iterator[Decode]:
    end = Decode(hub, clock)
    yield end
    end.close()


@pytest.fixture
def nothing_is_left(p: Prefill, d: Decode) -> Iterator[None]:
    """After the test, and after last words that cross each other."""
    yield
    settle(p, d)
    p.check_empty()
    d.check_empty()
