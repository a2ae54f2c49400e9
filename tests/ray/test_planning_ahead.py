"""Whether a node of a cluster on Ray plans ahead, where nobody has said it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from cluster import Topology
from cluster.directory_config import DirectoryAddress
from cluster.node_builder import stop_node
from cluster.ray_mode.node_actor import NodeFollower, _build
from cluster.ray_mode.spec import NodePlan
from directory import MemoryDirectory
from engine import PipelinedEngine
from protocol import Role
from tests.ray.ray_world import make_spec


async def test_a_unified_node_may_be_handed_to_before_long(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvrelay scale` may start a prefill node beside those that are all unified now."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the node sets for its process
    spec = make_spec(None, model_dir)
    config = dataclasses.replace(spec.config, topology=Topology.UNIFIED)
    plan = NodePlan(
        spec=msgspec.structs.replace(spec, config=config),
        role=Role.UNIFIED,
        node_id="unified-0",
        directory=DirectoryAddress("valkey://127.0.0.1:1"),
        nodes_on_host=1,
    )
    node = _build(plan, config, NodeFollower(MemoryDirectory(), ttl_s=1.0))
    try:
        assert isinstance(node.host.engine, PipelinedEngine)
        assert config.scheduler.async_scheduling is None
    finally:
        stop_node(node)
