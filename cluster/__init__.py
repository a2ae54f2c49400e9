"""Which processes run where? All nodes in one, or each in its own on one machine."""

from cluster.config import CacheSize, LocalConfig, NodeCores, ServeConfig, Topology
from cluster.local import LocalCluster
from cluster.node_compute import NodeCompute, RunnerFactory
from cluster.processes import ProcessCluster
from cluster.transfer_config import ConnectorSpec, TransferConfig, TransportChoice

__all__ = [
    "CacheSize",
    "ConnectorSpec",
    "LocalCluster",
    "LocalConfig",
    "NodeCompute",
    "NodeCores",
    "ProcessCluster",
    "RunnerFactory",
    "ServeConfig",
    "Topology",
    "TransferConfig",
    "TransportChoice",
]
