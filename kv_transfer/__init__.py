"""How do blocks move? Connector, transports, the state machine of a hand-off."""

from kv_transfer.block_copier import BlockCopier
from kv_transfer.connector import BaseConnector, KVConnector
from kv_transfer.custom import ConnectorContext, load_connector
from kv_transfer.digest import Digester, ThreadDigester
from kv_transfer.envelope import BadMessage, Envelopes, OtherVersion
from kv_transfer.events import EventKind, HandoffEvent
from kv_transfer.extents import Extents
from kv_transfer.geometry import Runs
from kv_transfer.handoff import HandoffConnector
from kv_transfer.handoff_config import HandoffConfig, OnTransferFailure
from kv_transfer.layout import BlockLayout, BlockPoolMemory, LayoutMismatch, PeerPool
from kv_transfer.multi import MultiConnector
from kv_transfer.states import HandoffState, Reason
from kv_transfer.transport import (
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    Received,
    Transport,
    Write,
    WriteState,
)
from kv_transfer.transports.auto import AutoTransport
from kv_transfer.transports.fault_plan import Fault, FaultKind, FaultPlan
from kv_transfer.transports.faulty import FaultyTransport
from kv_transfer.transports.memory import MemoryHub, MemoryTransport

__all__ = [
    "AutoTransport",
    "BadMessage",
    "BaseConnector",
    "BlockCopier",
    "BlockLayout",
    "BlockPoolMemory",
    "ConnectorContext",
    "Digester",
    "Envelopes",
    "EventKind",
    "Extents",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyTransport",
    "HandoffConfig",
    "HandoffConnector",
    "HandoffEvent",
    "HandoffState",
    "KVConnector",
    "LayoutMismatch",
    "MemoryHub",
    "MemoryTransport",
    "MultiConnector",
    "OnTransferFailure",
    "OtherVersion",
    "PeerLost",
    "PeerPool",
    "PeerRefused",
    "PeerUnreachable",
    "Reason",
    "Received",
    "Runs",
    "ThreadDigester",
    "Transport",
    "Write",
    "WriteState",
    "load_connector",
]
