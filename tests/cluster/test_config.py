"""The settings that a node gets, by its role."""

from __future__ import annotations

import pytest

from cluster import LocalConfig, NodeCores, Topology, TransferConfig, TransportChoice
from kv_transfer import HandoffConfig, OnTransferFailure
from protocol import ConfigError, Role
from scheduler import SchedulerConfig, SchedulerKnobs
from tests.hash_model import hash_files

MODEL = hash_files().config


def config_of(role: Role, local: LocalConfig, num_blocks: int = 100) -> SchedulerConfig:
    return local.scheduler_config(role, MODEL, num_blocks)


class TestKnobsOfARole:
    LOCAL = LocalConfig(
        scheduler=SchedulerKnobs(max_num_seqs=1),
        prefill_scheduler=SchedulerKnobs(max_num_seqs=2),
        decode_scheduler=SchedulerKnobs(max_num_seqs=3),
        max_model_len=600,
    )

    @pytest.mark.parametrize(
        ("role", "num_seqs"), [(Role.PREFILL, 2), (Role.DECODE, 3), (Role.UNIFIED, 3)]
    )
    def test_its_own(self, role: Role, num_seqs: int) -> None:
        config = config_of(role, self.LOCAL)
        assert (config.max_num_seqs, config.max_model_len) == (num_seqs, 600)

    @pytest.mark.parametrize("role", Role)
    def test_those_of_all(self, role: Role) -> None:
        local = LocalConfig(scheduler=SchedulerKnobs(policy="priority"))
        assert config_of(role, local).policy == "priority"


class TestParkedBlocks:
    def test_half_of_the_pool(self) -> None:
        assert config_of(Role.DECODE, LocalConfig(), 100).max_parked_blocks == 50

    def test_at_least_one(self) -> None:
        assert config_of(Role.DECODE, LocalConfig(), 1).max_parked_blocks == 1

    def test_as_said(self) -> None:
        local = LocalConfig(scheduler=SchedulerKnobs(max_parked_blocks=70))
        assert config_of(Role.DECODE, local, 100).max_parked_blocks == 70


def test_the_nodes_of_a_topology() -> None:
    local = LocalConfig(num_prefill=2, num_decode=3)
    assert local.num_nodes == {Role.PREFILL: 2, Role.DECODE: 3}
    unified = LocalConfig(topology=Topology.UNIFIED, num_prefill=2, num_decode=3)
    assert unified.num_nodes == {Role.UNIFIED: 3}


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        (NodeCores(), 4),
        (NodeCores(threads=7), 7),
        (NodeCores(cpus=(1, 3)), 2),
        (NodeCores(threads=1, cpus=(1, 3)), 1),
    ],
    ids=str,
)
def test_the_threads_of_a_node(cores: NodeCores, threads: int) -> None:
    assert cores.num_threads(num_cores=8, num_nodes=2) == threads


def test_a_node_has_at_least_one_thread() -> None:
    assert NodeCores().num_threads(num_cores=2, num_nodes=5) == 1


def test_auto_is_what_reaches_the_other_nodes() -> None:
    assert LocalConfig().transport is TransportChoice.MEMORY
    assert LocalConfig(processes=True).transport is TransportChoice.SHM
    chosen = TransferConfig(transport=TransportChoice.NIXL)
    assert LocalConfig(transfer=chosen).transport is TransportChoice.NIXL


def test_a_quarter_of_a_node_may_be_quarantined() -> None:
    assert TransferConfig().quarantine_limit(101) == 25
    assert TransferConfig(max_quarantine=0).quarantine_limit(101) == 0


def test_the_settings_of_the_hand_off() -> None:
    changed = {
        "reserve_timeout_s": 30.0,
        "transfer_timeout_s": 20.0,
        "heartbeat_s": 2.0,
        "checksums": False,
        "layerwise": True,
        "on_transfer_failure": "recompute",
    }
    assert TransferConfig().handoff() == HandoffConfig()
    assert TransferConfig(**changed).handoff() == HandoffConfig(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heartbeat_s", "problem"), [(0.0, "above 0"), (1e-9, "at least 0.01"), (60.0, "below")]
)
def test_signs_of_life_that_come_too_often_or_too_late(heartbeat_s: float, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"heartbeat_s: must be {problem}"):
        TransferConfig(heartbeat_s=heartbeat_s)


DRAFTS = SchedulerKnobs(spec_method="ngram", num_speculative_tokens=2, async_scheduling=False)


class TestErrors:
    @pytest.mark.parametrize(
        ("knobs", "field"), [(SchedulerKnobs(max_loras=1), "max_loras"), (DRAFTS, "spec_method")]
    )
    @pytest.mark.parametrize("name", ["scheduler", "prefill_scheduler", "decode_scheduler"])
    def test_what_the_engine_cannot_do_yet(
        self, name: str, knobs: SchedulerKnobs, field: str
    ) -> None:
        with pytest.raises(ConfigError, match=r"yet; leave it unset") as caught:
            LocalConfig(**{name: knobs})  # type: ignore[arg-type]
        assert caught.value.field == (field if name == "scheduler" else f"{name}.{field}")

    def test_of_a_role_and_this_model(self) -> None:
        whole = SchedulerKnobs(enable_chunked_prefill=False)
        local = LocalConfig(prefill_scheduler=whole, max_model_len=513)
        assert config_of(Role.DECODE, local).max_model_len == 513
        with pytest.raises(ConfigError) as caught:
            config_of(Role.PREFILL, local)
        assert caught.value.field == "prefill_scheduler.max_num_batched_tokens"


@pytest.mark.parametrize("choice", ["retry", "recompute", "fail"])
def test_the_router_knows_whether_decode_nodes_recompute(choice: OnTransferFailure) -> None:
    config = LocalConfig(transfer=TransferConfig(on_transfer_failure=choice))
    assert config.routing.decode_recomputes == (choice == "recompute")
