"""Which nodes plan a step while the one before it is computed, if nobody has said it, and if so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import ConnectorSpec, LocalCluster, LocalConfig, Topology, TransferConfig
from cluster.engine_node import EngineNode
from cluster.node_builder import NodeBuilder, stop_node
from cluster.transports import make_transport
from engine import Engine, EngineConfig, PipelinedEngine
from kv_transfer import MemoryHub
from protocol import ConfigError, GenerationRequest, Role, SamplingParams
from scheduler import SchedulerConfig, SchedulerKnobs
from tests.hash_cluster import read
from tests.hash_model import HashComputeFactory, expected_tokens, hash_files, prompt_of
from tests.service_node import Deaf

UNIFIED: dict[str, Any] = {"topology": Topology.UNIFIED}
ONLY_UNIFIED: dict[str, Any] = {"num_prefill": 0, "num_decode": 0, "num_unified": 2}
CUDA = EngineConfig(device="cuda")


@pytest.fixture
def connectors(tmp_path: Path) -> TransferConfig:
    told = ConnectorSpec(
        path="tests.told_connector:ToldConnector", options={"directory": str(tmp_path)}
    )
    return TransferConfig(connectors=(told,))


def config_of(**settings: Any) -> LocalConfig:
    return LocalConfig(max_model_len=512, num_blocks=64, **settings)


@contextmanager
def built(role: Role, *, roles_change: bool = False, **settings: Any) -> Iterator[EngineNode]:
    """A node that does not run."""
    config, hub = config_of(**settings), MemoryHub()
    builder = NodeBuilder(
        config=config,
        files=hash_files(),
        make_compute=HashComputeFactory(64),
        make_transport=lambda name: make_transport(config, name, hub=hub, token="of a test"),
        listener=Deaf(),
        roles_change=roles_change,
    )
    node = builder.build(role, f"{role}-0")
    try:
        yield node
    finally:
        stop_node(node)


def plans_ahead(node: EngineNode) -> bool:
    """The engine is what the scheduler was told."""
    engine = node.host.engine
    assert type(engine) in (Engine, PipelinedEngine)
    assert engine.scheduler.config.async_scheduling is isinstance(engine, PipelinedEngine)
    return isinstance(engine, PipelinedEngine)


class TestUnset:
    @pytest.mark.parametrize("settings", [UNIFIED, ONLY_UNIFIED], ids=str)
    def test_a_unified_node_on_a_cpu_does_not(self, settings: dict[str, Any]) -> None:
        with built(Role.UNIFIED, **settings) as node:
            assert not plans_ahead(node)

    def test_with_a_connector_it_does(self, connectors: TransferConfig) -> None:
        with built(Role.UNIFIED, **UNIFIED, transfer=connectors) as node:
            assert plans_ahead(node)

    def test_on_a_gpu_it_does(self) -> None:
        with built(Role.UNIFIED, **UNIFIED, engine=CUDA) as node:
            assert plans_ahead(node)

    def test_where_roles_change_it_does(self) -> None:
        with built(Role.UNIFIED, **UNIFIED, roles_change=True) as node:
            assert plans_ahead(node)

    @pytest.mark.parametrize("role", list(Role))
    def test_all_nodes_do_that_hand_off_or_may_be_handed_to(self, role: Role) -> None:
        with built(role, num_unified=1) as node:
            assert plans_ahead(node)

    @pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
    def test_they_do_beside_unified_ones_that_were_there_first(self, role: Role) -> None:
        with built(role, **UNIFIED) as node:
            assert plans_ahead(node)


@pytest.mark.parametrize("said", [True, False])
class TestSaid:
    """Then it holds, wherever it would be otherwise."""

    @pytest.mark.parametrize("role", list(Role))
    @pytest.mark.parametrize("settings", [{}, UNIFIED, {"engine": CUDA}], ids=str)
    def test_of_all_nodes(self, role: Role, settings: dict[str, Any], said: bool) -> None:
        knobs = SchedulerKnobs(async_scheduling=said)
        with built(role, **settings, scheduler=knobs) as node:
            assert plans_ahead(node) is said

    def test_with_a_connector(self, connectors: TransferConfig, said: bool) -> None:
        knobs = SchedulerKnobs(async_scheduling=said)
        with built(Role.UNIFIED, **UNIFIED, transfer=connectors, scheduler=knobs) as node:
            assert plans_ahead(node) is said

    def test_of_a_role(self, said: bool) -> None:
        own = SchedulerKnobs(async_scheduling=said)
        with built(Role.DECODE, decode_scheduler=own) as node:
            assert plans_ahead(node) is said
        with built(Role.PREFILL, decode_scheduler=own) as node:
            assert plans_ahead(node)


@pytest.mark.parametrize("settings", [{}, UNIFIED], ids=str)
async def test_a_node_keeps_to_it_when_its_role_changes(settings: dict[str, Any]) -> None:
    """It takes all roles, and there it gives the right tokens, whatever its engine is."""
    config = config_of(**{"num_unified": 2, **settings})
    cluster = LocalCluster(config, hash_files(), HashComputeFactory(64))
    await cluster.start()
    try:
        node, peer = [node for node in cluster.nodes if node.info.role is Role.UNIFIED]
        before = plans_ahead(node)
        assert before is not bool(settings)
        for role, of_peer in (
            (Role.PREFILL, Role.DECODE),
            (Role.DECODE, Role.PREFILL),
            (Role.UNIFIED, Role.UNIFIED),
        ):
            await cluster.change_role(node.info.node_id, role)
            await cluster.change_role(peer.info.node_id, of_peer)
            assert plans_ahead(node) is before
            await check_answer(cluster, prompt_of(90, list(Role).index(role)))
    finally:
        await cluster.stop()


async def check_answer(cluster: LocalCluster, prompt: list[int]) -> None:
    sampling = SamplingParams(max_tokens=5)
    request = GenerationRequest(
        request_id=f"r{prompt[0]}",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        arrival_time=0.0,
    )
    tokens = await read(await cluster.dispatcher.submit(request))
    assert tokens == expected_tokens(prompt, sampling)


async def test_what_is_said_of_another_role_is_not_overlooked() -> None:
    own = SchedulerKnobs(async_scheduling=True)
    with built(Role.UNIFIED, **UNIFIED, prefill_scheduler=own) as node:
        assert not plans_ahead(node)
        with pytest.raises(ConfigError, match=r"^async_scheduling: .*unified and prefill nodes"):
            await node.change_role(Role.PREFILL)


class TestDraftTokens:
    """Those for a step are known only when the one before it has run."""

    def test_unset_means_off(self) -> None:
        knobs = SchedulerKnobs(spec_method="ngram", num_speculative_tokens=2)
        assert not knobs.plans_ahead(True)
        assert not SchedulerConfig.of(knobs).async_scheduling

    def test_on_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match=r"^async_scheduling: must be off with draft tokens"):
            SchedulerKnobs(spec_method="ngram", num_speculative_tokens=2, async_scheduling=True)
