from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kv_transfer.peering import Medium
from tests.kv_transfer.conformance_end import usage
from tests.kv_transfer.peering.nodes import MEDIA, Node

MakeNode = Callable[..., Node]


@pytest.fixture(params=list(MEDIA))
def make_medium(request: pytest.FixtureRequest) -> Callable[[], Medium]:
    return MEDIA[request.param]


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    before = usage()
    yield
    assert usage() == before


@pytest.fixture
def make_node(nothing_is_left: None, make_medium: Callable[[], Medium]) -> Iterator[MakeNode]:
    """A node by its name, on the medium of this test; closed at its end."""
    made = []

    def make(name: str, **options: Any) -> Node:
        made.append(Node(name, make_medium(), **options))
        return made[-1]

    yield make
    for node in made:
        node.network.close()
