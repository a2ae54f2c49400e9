"""cluster.yaml: what it may say, what comes of it, and how it is told what is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import LocalConfig, ServeConfig, Topology
from cluster.file import ClusterFile
from cluster.yaml_file import load_yaml
from decode_node import DecodeConfig
from protocol import ConfigError
from router import RouterConfig
from scheduler import SchedulerKnobs
from tests.cluster.other_knobs import OTHER_KNOBS, UNSUPPORTED

SHIPPED = Path(__file__).parents[2] / "cluster.yaml"
KNOBS = sorted(knob.name for knob in dataclasses.fields(SchedulerKnobs))

Read = Callable[[str], ClusterFile]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(text: str) -> ClusterFile:
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return load_yaml(path, ClusterFile)

    return read


class TestTheShippedFile:
    def test_it_gives_the_defaults(self) -> None:
        shipped = load_yaml(SHIPPED, ClusterFile)
        assert shipped.local_config() == LocalConfig()
        cache_dir = Path("cache")
        assert shipped.serve_config(cache_dir) == ClusterFile().serve_config(cache_dir)
        assert ClusterFile().serve_config(cache_dir) == ServeConfig(
            cache_dir=cache_dir, model="smollm2-135m"
        )

    def test_it_shows_every_setting(self) -> None:
        def keys(values: dict[str, Any]) -> set[str]:
            inner = {f"{k}.{i}" for k, v in values.items() if isinstance(v, dict) for i in keys(v)}
            return {*values, *inner}

        every = ClusterFile(scheduler=dataclasses.asdict(SchedulerKnobs())).model_dump()
        assert keys(load_yaml(SHIPPED, ClusterFile).model_dump(exclude_unset=True)) == keys(every)


def test_everything_at_once(read: Read) -> None:
    file = read(
        "model: ./tiny\ntopology: unified\nmax_model_len: 100\n"
        "prefill: {count: 2}\ndecode: {count: 3, reserve: on_arrival}\n"
        "cache: {block_size: 32, kv_memory: 5000000, num_blocks: 7, enable_prefix_caching: false}\n"
        "router: {policy: round_robin}\ngateway: {host: 0.0.0.0, port: 0}\n"
    )
    assert file.local_config() == LocalConfig(
        topology=Topology.UNIFIED,
        num_prefill=2,
        num_decode=3,
        block_size=32,
        kv_memory_bytes=5_000_000,
        num_blocks=7,
        max_model_len=100,
        enable_prefix_caching=False,
        decode=DecodeConfig(reserve="on_arrival"),
        router=RouterConfig(policy="round_robin"),
    )
    assert file.serve_config(Path("c")) == ServeConfig(
        host="0.0.0.0", port=0, cache_dir=Path("c"), model="./tiny"
    )


class TestKnobs:
    @pytest.mark.parametrize("name", [name for name in KNOBS if name not in UNSUPPORTED])
    @pytest.mark.parametrize("place", ["scheduler", "prefill.scheduler", "decode.scheduler"])
    def test_each_can_be_set(self, read: Read, place: str, name: str) -> None:
        values = OTHER_KNOBS[name]
        role = place.rpartition(".")[0]
        text = f"scheduler: {_flow(values)}"
        local = read(f"{role}: {{{text}}}" if role else text).local_config()
        field = place.replace(".", "_")
        changed: dict[str, Any] = {field: SchedulerKnobs(**values)}
        assert local == LocalConfig(**changed)
        assert getattr(getattr(local, field), name) != getattr(LocalConfig().scheduler, name)

    @pytest.mark.parametrize("name", sorted(UNSUPPORTED))
    def test_what_the_engine_cannot_do_yet(self, read: Read, name: str) -> None:
        file = read(f"decode: {{scheduler: {_flow(OTHER_KNOBS[name])}}}")
        with pytest.raises(ConfigError, match=r"^decode\.scheduler\..*engine.*yet"):
            file.local_config()

    def test_a_role_changes_what_holds_for_all(self, read: Read) -> None:
        local = read(
            "scheduler: {max_num_seqs: 8, policy: priority}\nprefill: {scheduler: {policy: fcfs}}"
        ).local_config()
        assert local.scheduler == SchedulerKnobs(max_num_seqs=8, policy="priority")
        assert local.prefill_scheduler == SchedulerKnobs(max_num_seqs=8, policy="fcfs")
        assert local.decode_scheduler is None


class TestSettingsOverIt:
    def test_they_win(self, read: Read) -> None:
        file = read("scheduler: {max_num_seqs: 8}\ncache: {block_size: 32}").with_settings(
            {"scheduler.max_num_seqs": 9, "topology": "unified", "cache.kv_memory": "2GiB"}
        )
        assert file.local_config() == LocalConfig(
            topology=Topology.UNIFIED,
            block_size=32,
            kv_memory_bytes=2 << 30,
            scheduler=SchedulerKnobs(max_num_seqs=9),
        )

    def test_a_knob_is_then_that_of_all_nodes(self, read: Read) -> None:
        file = read(
            "prefill: {scheduler: {max_num_seqs: 8}}\ndecode: {scheduler: {max_num_seqs: 7}}"
        )
        local = file.with_settings({"scheduler.max_num_seqs": 9}).local_config()
        assert local == LocalConfig(scheduler=SchedulerKnobs(max_num_seqs=9))

    def test_the_file_stays_as_it_is(self, read: Read) -> None:
        file = read("prefill: {scheduler: {max_num_seqs: 8}}")
        file.with_settings({"scheduler.max_num_seqs": 9, "gateway.port": 1})
        assert file == read("prefill: {scheduler: {max_num_seqs: 8}}")

    def test_a_wrong_one(self) -> None:
        with pytest.raises(ConfigError) as caught:
            ClusterFile().with_settings({"topology": "mixed"})
        words = "must be 'disaggregated' or 'unified', not 'mixed'"
        assert (caught.value.field, caught.value.problem) == ("topology", words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modle: x\n", "1: modle: is unknown (did you mean model?); known are model, topology,"),
        ("\nprefill:\n  cuont: 1\n",
         "3: prefill.cuont: is unknown (did you mean count?); known are count, scheduler"),
        ("scheduler:\n  max_num_seq: 1\n",
         "2: scheduler.max_num_seq: is unknown (did you mean max_num_seqs?); known are max_num_s"),
        ("decode:\n  scheduler:\n    polizy: 1\n",
         "3: decode.scheduler.polizy: is unknown (did you mean policy?); known are max_num_seqs"),
        ("scheduler:\n  max_num_seqs: yes\n",
         "2: scheduler.max_num_seqs: must be a whole number, not true"),
        ("scheduler:\n  policy: lifo\n",
         "2: scheduler.policy: must be 'fcfs' or 'priority', not 'lifo'"),
        ("scheduler:\n", "1: scheduler: must be keys with values, not nothing"),
        ("topology: mixed\n", "1: topology: must be 'disaggregated' or 'unified', not 'mixed'"),
        ("decode: {reserve: never}\n", "1: decode.reserve: must be 'on_start' or 'on_arrival', no"),
        ("gateway:\n  port: '80'\n", "2: gateway.port: must be a whole number, not '80'"),
        ("cache: {kv_memory: true}\n", "1: cache.kv_memory: must be text, not true"),
    ],
)  # fmt: skip
def test_what_may_not_stand_in_it(read: Read, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).partition("a.yaml:")[2].startswith(said)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("prefill: {count: 0}", "prefill.count"),
        ("decode: {count: 0}", "decode.count"),
        ("max_model_len: 1", "max_model_len"),
        ("cache: {block_size: 17}", "cache.block_size"),
        ("cache: {kv_memory: lots}", "cache.kv_memory"),
        ("cache: {kv_memory: 0}", "cache.kv_memory"),
        ("cache: {num_blocks: 0}", "cache.num_blocks"),
        ("router: {policy: random}", "router.policy"),
        ("scheduler: {max_num_seqs: 0}", "scheduler.max_num_seqs"),
        ("prefill: {scheduler: {max_num_seqs: 513}}", "prefill.scheduler.max_num_batched_tokens"),
        ("decode: {scheduler: {max_loras: 1}}", "decode.scheduler.max_loras"),
    ],
)
def test_what_is_out_of_range_is_named_by_its_place(read: Read, text: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text).local_config()
    assert caught.value.field == field


def _flow(values: dict[str, Any]) -> str:
    """As YAML in braces."""
    words = {True: "true", False: "false"}
    pairs = (f"{k}: {words[v] if isinstance(v, bool) else v}" for k, v in values.items())
    return "{" + ", ".join(pairs) + "}"
