"""Errors that cross a process boundary arrive as what they were."""

from __future__ import annotations

import msgspec
import pytest

from cluster.wire_error import WireError
from kv_transfer import LayoutMismatch, PeerRefused
from protocol import (
    ConfigError,
    InvalidRequest,
    KvrelayError,
    ModelError,
    ModelNotFound,
    NodeLost,
    NoHealthyNode,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    TransferFailed,
)


def over_the_wire(error: KvrelayError | TimeoutError) -> KvrelayError | TimeoutError:
    data = msgspec.msgpack.encode(WireError.of(error))
    return msgspec.msgpack.decode(data, type=WireError).restored()


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("max_model_len", "too large"),
        ModelError("no such model", path="/nowhere"),
        ModelError("a broken one"),
        InvalidRequest("min_tokens", "too many"),
        PromptTooLong("prompt", 10, 5, "this node"),
        ModelNotFound("x", ("a", "b")),
        Overloaded("full", 1.5),
        NoHealthyNode("none"),
        NodeLost("gone"),
        TransferFailed("deadline"),
        RequestFailed("something else"),
        LayoutMismatch("dtype differs"),
        PeerRefused("wrong token"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_class_words_and_fields_are_kept(error: KvrelayError) -> None:
    arrived = over_the_wire(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_a_node_that_takes_too_long() -> None:
    arrived = over_the_wire(TimeoutError("a step"))
    assert isinstance(arrived, TimeoutError)
    assert str(arrived) == "a step"


def test_a_class_that_only_the_sender_knows() -> None:
    arrived = WireError("of_a_plugin", "it broke", {"place": 3}).restored()
    assert type(arrived) is RequestFailed
    assert str(arrived) == "it broke"
