"""Which hosts a Ray cluster has, as its head knows them."""

from __future__ import annotations

import json
import sys

_SCRIPT = """
import json, sys
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10).values()
print(json.dumps([[n.state, n.node_manager_address, dict(n.resources_total)] for n in nodes]))
"""
_ALIVE = 0
TIMEOUT_S = 20.0


def command(address: str) -> list[str]:
    """Of a process that asks, and has Ray's token in its environment."""
    return [sys.executable, "-c", _SCRIPT, address]


def living_nodes(answer: str | bytes) -> dict[str, dict[str, float]]:
    """The resources of each, by its address."""
    return {address: own for state, address, own in json.loads(answer) if state == _ALIVE}
