"""The settings that a node gets, by its role."""

from __future__ import annotations

import pytest

from cluster import LocalConfig, Topology
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
