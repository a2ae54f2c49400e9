"""A device for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.cuda.deferred_stream import DeferredStream


@pytest.fixture
def stream() -> Iterator[DeferredStream]:
    made = DeferredStream()
    yield made
    made.close()
    made.check()
