"""Which processes run where? Local mode: everything in one."""

from cluster.config import LocalConfig, ServeConfig, Topology
from cluster.local import LocalCluster, NodeCompute, RunnerFactory

__all__ = [
    "LocalCluster",
    "LocalConfig",
    "NodeCompute",
    "RunnerFactory",
    "ServeConfig",
    "Topology",
]
