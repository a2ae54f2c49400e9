"""cluster.yaml: what it may say, what comes of it, and how it is told what is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import (
    CacheSize,
    ConnectorSpec,
    LocalConfig,
    NodeCores,
    ServeConfig,
    Topology,
    TransferConfig,
    TransportChoice,
)
from cluster.file import ClusterFile
from cluster.yaml_file import load_yaml
from decode_node import DecodeConfig
from engine import EngineConfig, KernelsChoice, Quantization
from protocol import ConfigError, Role
from router import RouterConfig
from scheduler import SchedulerKnobs
from tests.cluster.other_knobs import OTHER_KNOBS, UNSUPPORTED
from tests.hash_model import HASH_MODEL

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
    def test_it_gives_the_defaults_but_for_the_numbers_of_nodes(self) -> None:
        shipped, defaults = load_yaml(SHIPPED, ClusterFile), ClusterFile()
        assert shipped.local_config() == LocalConfig(num_prefill=2, num_decode=2)
        for section in ("gateway", "ray", "directory", "autoscaling"):
            assert getattr(shipped, section) == getattr(defaults, section), section
        assert shipped.resources() == defaults.resources()
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
        "processes: true\nprefill: {count: 2, threads: 3}\n"
        "decode: {count: 3, cpus: [0, 1], reserve: on_arrival}\n"
        "transfer:\n  transport: nixl\n  bind: 10.0.0.1\n  nixl_device: eth0\n"
        "  nixl_transports: tcp\n  layerwise: true\n  checksums: false\n"
        "  on_transfer_failure: fail\n  max_quarantine: 5\n  reserve_timeout_s: 30\n"
        "  transfer_timeout_s: 20.5\n  heartbeat_s: 2\n"
        "  connectors: [{class: 'a.b:C', options: {x: 1}}, {class: 'a.b:D'}]\n"
        "cache: {block_size: 32, kv_memory: 5000000, num_blocks: 7, enable_prefix_caching: false}\n"
        "router: {policy: round_robin}\ngateway: {host: 0.0.0.0, port: 0}\n"
    )
    assert file.local_config() == LocalConfig(
        topology=Topology.UNIFIED,
        processes=True,
        num_prefill=2,
        num_decode=3,
        prefill_cores=NodeCores(threads=3),
        decode_cores=NodeCores(cpus=(0, 1)),
        transfer=TransferConfig(
            transport=TransportChoice.NIXL,
            bind="10.0.0.1",
            nixl_device="eth0",
            nixl_transports="tcp",
            layerwise=True,
            checksums=False,
            on_transfer_failure="fail",
            max_quarantine=5,
            reserve_timeout_s=30.0,
            transfer_timeout_s=20.5,
            heartbeat_s=2.0,
            connectors=(
                ConnectorSpec(path="a.b:C", options={"x": 1}),
                ConnectorSpec(path="a.b:D"),
            ),
        ),
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


class TestEngine:
    """How nodes compute."""

    @pytest.mark.parametrize(
        ("text", "engine"),
        [
            ("kv_cache_dtype: bfloat16", EngineConfig(kv_cache_dtype="bfloat16")),
            ("quantization: int8", EngineConfig(quantization=Quantization.INT8)),
            ("quantization: null", EngineConfig()),
            ("kernels: torch", EngineConfig(kernels=KernelsChoice.TORCH)),
            ("batch_invariant: true", EngineConfig(batch_invariant=True)),
            ("dtype: float32", EngineConfig(dtype="float32")),
            (
                "device: 'cuda:1', dtype: float16, attention: varlen",
                EngineConfig(device="cuda:1", dtype="float16", attention="varlen"),
            ),
        ],
    )
    def test_as_said(self, read: Read, text: str, engine: EngineConfig) -> None:
        assert read(f"engine: {{{text}}}").local_config() == LocalConfig(engine=engine)

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_threads_of_nodes_that_share_a_process(self, read: Read, role: str) -> None:
        local = read(f"{role}: {{threads: 3}}").local_config()
        assert local.cores(Role(role)) == NodeCores(threads=3)
        assert not local.processes

    def test_what_the_cache_holds_counts_for_how_many_blocks_there_are(self, read: Read) -> None:
        full, half = (
            read(f"cache: {{kv_memory: 64MiB}}\nengine: {{kv_cache_dtype: {dtype}}}")
            .local_config()
            .kv_cache(HASH_MODEL, Role.DECODE)
            for dtype in ("float32", "bfloat16")
        )
        assert (full.dtype, half.dtype) == ("float32", "bfloat16")
        assert half.bytes_per_block * 2 == full.bytes_per_block
        assert half.num_blocks // 2 == full.num_blocks


class TestKnobs:
    @pytest.mark.parametrize("name", [name for name in KNOBS if name not in UNSUPPORTED])
    @pytest.mark.parametrize("place", ["scheduler", *(f"{role}.scheduler" for role in Role)])
    def test_each_can_be_set(self, read: Read, place: str, name: str) -> None:
        values = OTHER_KNOBS[name]
        role = place.rpartition(".")[0]
        text = f"scheduler: {_flow(values)}"
        local = read(f"{role}: {{{text}}}" if role else text).local_config()
        field = place.replace(".", "_")
        changed: dict[str, Any] = {field: SchedulerKnobs(**values)}
        assert local == LocalConfig(**changed)
        assert getattr(getattr(local, field), name) != getattr(LocalConfig().scheduler, name)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("{}", None),
            ("{async_scheduling: null}", None),
            ("{async_scheduling: true}", True),
            ("{async_scheduling: false}", False),
        ],
    )
    def test_planning_ahead_is_on_off_or_left_to_the_nodes(
        self, read: Read, text: str, value: bool | None
    ) -> None:
        assert read(f"scheduler: {text}").local_config().scheduler.async_scheduling is value
        own = read(f"scheduler: {{async_scheduling: true}}\ndecode: {{scheduler: {text}}}")
        decode = own.local_config().decode_scheduler
        assert (decode and decode.async_scheduling) is (None if text == "{}" else value)

    def test_planning_ahead_is_nothing_else(self, read: Read) -> None:
        with pytest.raises(ConfigError, match=r"scheduler\.async_scheduling: .*maybe"):
            read("scheduler: {async_scheduling: maybe}")

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
            "prefill: {scheduler: {max_num_seqs: 8}}\ndecode: {scheduler: {max_num_seqs: 7}}\n"
            "unified: {scheduler: {max_num_seqs: 6}}"
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
        ("modle: x\n", "1: modle: is unknown (did you mean model?); known are name, model,"),
        ("\nprefill:\n  cuont: 1\n",
         "3: prefill.cuont: is unknown (did you mean count?); known are num_cpus, num_gpus"),
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
        ("transfer: {transport: x}\n", "1: transfer.transport: must be 'auto', 'memory', 'shm' or"),
        ("transfer:\n  on_transfer_failure: no\n",
         "2: transfer.on_transfer_failure: must be 'retry', 'recompute' or 'fail', not false"),
        ("transfer:\n  connectors: [a:B]\n",
         "2: transfer.connectors[0]: must be keys with values, not 'a:B'"),
        ("transfer:\n  connectors:\n    - {options: {}}\n",
         "3: transfer.connectors[0].class: is missing"),
        ("decode: {cpus: 1}\n", "1: decode.cpus: must be a list, not 1"),
        ("processes: 2\n", "1: processes: must be true or false, not 2"),
        ("cache: {kv_memory: true}\n", "1: cache.kv_memory: must be text, not true"),
        ("engine: {devise: cpu}\n", "1: engine.devise: is unknown (did you mean device?); known "),
        ("engine:\n  kernels: fast\n",
         "2: engine.kernels: must be 'auto', 'compiled' or 'torch', not 'fast'"),
        ("engine: {quantization: int4}\n", "1: engine.quantization: must be 'int8', not 'int4'"),
        ("engine: {batch_invariant: 1}\n", "1: engine.batch_invariant: must be true or false, not"),
        ("engine: {device: 0}\n", "1: engine.device: must be text, not 0"),
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
        ("unified: {count: -1}", "unified.count"),
        ("unified: {count: 1}\ndecode: {count: 0}", "decode.count"),
        ("unified: {cpus: [0]}", "unified.cpus"),
        ("unified: {scheduler: {max_num_seqs: 0}}", "unified.scheduler.max_num_seqs"),
        ("unified: {cache: {kv_memory: lots}}", "unified.cache.kv_memory"),
        ("max_model_len: 1", "max_model_len"),
        ("cache: {block_size: 17}", "cache.block_size"),
        ("cache: {kv_memory: lots}", "cache.kv_memory"),
        ("cache: {kv_memory: 0}", "cache.kv_memory"),
        ("cache: {num_blocks: 0}", "cache.num_blocks"),
        ("router: {policy: random}", "router.policy"),
        ("processes: true\ntransfer: {transport: memory}", "transfer.transport"),
        ("processes: true\nprefill: {threads: 0}", "prefill.threads"),
        ("processes: true\ndecode: {cpus: []}", "decode.cpus"),
        ("processes: true\ndecode: {cpus: [-1]}", "decode.cpus"),
        ("decode: {threads: -1}", "decode.threads"),
        ("unified: {threads: 0}", "unified.threads"),
        ("decode: {cpus: [0]}", "decode.cpus"),
        ("transfer: {bind: localhost}", "transfer.bind"),
        ("transfer: {max_quarantine: -1}", "transfer.max_quarantine"),
        ("transfer: {reserve_timeout_s: 0}", "transfer.reserve_timeout_s"),
        ("transfer: {transfer_timeout_s: .inf}", "transfer.transfer_timeout_s"),
        ("transfer: {transfer_timeout_s: .nan}", "transfer.transfer_timeout_s"),
        ("transfer: {heartbeat_s: -1}", "transfer.heartbeat_s"),
        ("transfer: {heartbeat_s: 60}", "transfer.heartbeat_s"),
        ("scheduler: {max_num_seqs: 0}", "scheduler.max_num_seqs"),
        ("prefill: {scheduler: {max_num_seqs: 513}}", "prefill.scheduler.max_num_batched_tokens"),
        ("decode: {scheduler: {max_loras: 1}}", "decode.scheduler.max_loras"),
        ("engine: {device: gpu}", "engine.device"),
        ("engine: {dtype: float16}", "engine.dtype"),
        ("engine: {kv_cache_dtype: int8}", "engine.kv_cache_dtype"),
        ("engine: {attention: varlen}", "engine.attention"),
        ("engine: {device: cuda, kernels: torch}", "engine.kernels"),
        ("engine: {device: cuda, quantization: int8}", "engine.quantization"),
        ("engine: {batch_invariant: true, kernels: torch}", "engine.batch_invariant"),
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


def test_a_kind_of_node_may_have_a_cache_of_other_sizes(read: Read) -> None:
    file = read(
        "cache: {block_size: 32, num_blocks: 100}\n"
        "prefill:\n  cache: {kv_memory: 2GiB}\n"
        "decode:\n  cache: {block_size: 64}\n"
    )
    config = file.local_config()
    assert config.prefill_cache == CacheSize(block_size=32, kv_memory_bytes=2 << 30)
    assert config.decode_cache == CacheSize(block_size=64, num_blocks=100)
    assert config.cache_size(Role.UNIFIED) == config.decode_cache
    assert ClusterFile().local_config().cache_size(Role.PREFILL) == CacheSize()


class TestUnified:
    def test_what_is_left_out_is_as_in_decode(self, read: Read) -> None:
        local = read(
            "processes: true\nunified: {count: 2}\n"
            "decode: {threads: 3, cache: {num_blocks: 9}, scheduler: {max_num_seqs: 7}}\n"
        ).local_config()
        assert local.num_nodes == {Role.PREFILL: 1, Role.DECODE: 1, Role.UNIFIED: 2}
        assert local.cores(Role.UNIFIED) == NodeCores(threads=3)
        assert local.cache_size(Role.UNIFIED) == CacheSize(num_blocks=9)
        assert local.scheduler_config(Role.UNIFIED, HASH_MODEL, 9).max_num_seqs == 7

    def test_value_by_value(self, read: Read) -> None:
        local = read(
            "processes: true\ncache: {block_size: 32}\nscheduler: {policy: priority}\n"
            "decode: {threads: 3, cpus: [0, 1, 2], cache: {block_size: 64, num_blocks: 9},\n"
            "         scheduler: {max_num_seqs: 7}}\n"
            "unified: {count: 1, threads: 2, cache: {kv_memory: 2GiB},\n"
            "          scheduler: {max_num_batched_tokens: 99}}\n"
        ).local_config()
        assert local.unified_cores == NodeCores(threads=2, cpus=(0, 1, 2))
        assert local.unified_cache == CacheSize(block_size=64, kv_memory_bytes=2 << 30)
        assert local.unified_scheduler == SchedulerKnobs(
            policy="priority", max_num_seqs=7, max_num_batched_tokens=99
        )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("prefill:\n  cache: {block_size: 20}\n", r"^prefill\.cache\.block_size: "),
        ("decode:\n  cache: {num_blocks: 0}\n", r"^decode\.cache\.num_blocks: "),
        ("decode:\n  cache: {kv_memory: lots}\n", r"^decode\.cache\.kv_memory: "),
    ],
)
def test_wrong_sizes_of_a_kind_of_node(read: Read, text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        read(text).local_config()
