"""How do blocks move? Connector, transports, the state machine of a hand-off."""

from kv_transfer.connector import KVConnector
from kv_transfer.handoff import (
    EventKind,
    HandoffConfig,
    HandoffConnector,
    HandoffEvent,
)
from kv_transfer.layout import BlockLayout, BlockPoolMemory, LayoutMismatch
from kv_transfer.states import HandoffState, Reason
from kv_transfer.transport import PeerUnreachable, Transport, Write, WriteState
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.wire import BadMessage

__all__ = [
    "BadMessage",
    "BlockLayout",
    "BlockPoolMemory",
    "EventKind",
    "HandoffConfig",
    "HandoffConnector",
    "HandoffEvent",
    "HandoffState",
    "KVConnector",
    "LayoutMismatch",
    "MemoryHub",
    "MemoryTransport",
    "PeerUnreachable",
    "Reason",
    "Transport",
    "Write",
    "WriteState",
]
