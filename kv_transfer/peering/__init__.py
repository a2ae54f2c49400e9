"""How do nodes find, trust and lose each other? Authenticated messages between processes."""

from kv_transfer.peering.cluster_token import ClusterToken
from kv_transfer.peering.config import PeeringConfig
from kv_transfer.peering.medium import Medium, TcpMedium, UnixMedium
from kv_transfer.peering.network import PeerNetwork
from kv_transfer.peering.passport import Passport, ProcessIdentity

__all__ = [
    "ClusterToken",
    "Medium",
    "Passport",
    "PeerNetwork",
    "PeeringConfig",
    "ProcessIdentity",
    "TcpMedium",
    "UnixMedium",
]
