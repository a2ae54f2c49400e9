"""Settings come from the command line, from cluster.yaml and from defaults, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from cluster import LocalCluster, LocalConfig, Topology
from cluster.file import ClusterFile
from kvrelay import cli
from kvrelay.deployment import OPTIONS, Deployment
from kvrelay.model_options import DEFAULT_MODEL
from kvrelay.serve_options import given_options
from protocol import ConfigError
from scheduler import SchedulerKnobs
from tests.cluster.other_knobs import OTHER_KNOBS, UNSUPPORTED
from tests.hash_model import HashComputeFactory, hash_files
from tests.kvrelay.command import Kvrelay

SHIPPED = Path(__file__).parents[2] / "cluster.yaml"
KNOBS = sorted(knob.name for knob in dataclasses.fields(SchedulerKnobs))

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return path

    return write


def deployment(*arguments: str, file: Path | None = None) -> Deployment:
    """What `kvrelay serve` with these arguments is to serve."""
    command = getattr(typer.main.get_command(cli.app), "commands")["serve"]  # noqa: B009
    with command.make_context("serve", list(arguments)) as context:
        return Deployment.read(file, given_options(context))


def settings(*arguments: str, file: Path | None = None) -> ClusterFile:
    return deployment(*arguments, file=file).settings


def knob_options(name: str) -> list[str]:
    """A value of a knob that is not its default, and what goes with it, as they are typed."""
    typed = []
    for knob, value in OTHER_KNOBS[name].items():
        option = OPTIONS[f"scheduler.{knob}"].replace("_", "-")
        if isinstance(value, bool):
            typed.append(f"--{option}" if value else f"--no-{option}")
        else:
            typed.append(f"--{option}={value}")
    return typed


class TestEveryKnobHasAnOption:
    @pytest.mark.parametrize("name", [name for name in KNOBS if name not in UNSUPPORTED])
    def test_it_arrives_in_the_nodes(self, name: str) -> None:
        local = settings(*knob_options(name), "--max-model-len=512").local_config()
        cluster = LocalCluster(local, hash_files(), HashComputeFactory(64))
        assert len(cluster.nodes) == 2
        for node in cluster.nodes:
            config = node.host.engine.scheduler.config
            assert getattr(config, name) == OTHER_KNOBS[name][name]

    @pytest.mark.parametrize("name", sorted(UNSUPPORTED))
    def test_what_the_engine_cannot_do_yet(self, name: str) -> None:
        asked_for = settings(*knob_options(name))
        assert asked_for.scheduler == OTHER_KNOBS[name]
        with pytest.raises(ConfigError, match=r"this engine .* yet"):
            asked_for.local_config()

    @pytest.mark.parametrize(
        ("typed", "value"),
        [([], None), (["--async-scheduling"], True), (["--no-async-scheduling"], False)],
    )
    def test_planning_ahead_is_on_off_or_left_to_the_nodes(
        self, typed: list[str], value: bool | None
    ) -> None:
        local = settings(*typed, "--topology=unified", "--max-model-len=512").local_config()
        assert local.scheduler.async_scheduling is value
        (node,) = LocalCluster(local, hash_files(), HashComputeFactory(64)).nodes
        assert node.host.engine.scheduler.config.async_scheduling is bool(value)


class TestDefaults:
    def test_those_of_the_shipped_file_are_those_without_a_file_but_for_the_nodes(self) -> None:
        ours, shipped = settings(), settings(file=SHIPPED)
        assert ours.local_config() == LocalConfig()
        assert shipped.local_config() == LocalConfig(num_prefill=2, num_decode=2)
        assert ours.serve_config(Path("c")) == shipped.serve_config(Path("c"))

    @pytest.mark.parametrize("place", sorted(OPTIONS))
    def test_those_that_help_shows_are_true(self, place: str) -> None:
        values = ClusterFile(scheduler=dataclasses.asdict(SchedulerKnobs())).model_dump()
        for key in place.split("."):
            values = values[key]
        command = getattr(typer.main.get_command(cli.app), "commands")["serve"]  # noqa: B009
        shown = {parameter.name: parameter.default for parameter in command.params}
        assert shown[OPTIONS[place]] == values

    def test_the_model_to_fetch_is_the_one_to_serve(self) -> None:
        assert ClusterFile().model == DEFAULT_MODEL


class TestOptionsWinOverTheFile:
    def test_only_those_that_are_typed(self, write: Write) -> None:
        file = write(
            "model: ./a\ntopology: unified\ndecode: {count: 3}\nscheduler: {max_num_seqs: 7}\n"
            "gateway: {port: 1}\n"
        )
        assert settings("./b", "--port=2", "--max-num-batched-tokens=8", file=file) == settings(
            *("./b", "--topology=unified", "--decode=3", "--max-num-seqs=7", "--port=2"),
            "--max-num-batched-tokens=8",
        )

    def test_even_with_the_default(self, write: Write) -> None:
        file = write("scheduler: {max_num_seqs: 7, async_scheduling: false}\nmax_model_len: 9")
        local = settings("--max-num-seqs=64", "--async-scheduling", file=file).local_config()
        knobs = SchedulerKnobs(async_scheduling=True)
        assert local == LocalConfig(max_model_len=9, scheduler=knobs)

    def test_a_file_for_both_halves_can_be_served_unified(self) -> None:
        local = settings("--topology=unified", file=SHIPPED).local_config()
        assert local == LocalConfig(topology=Topology.UNIFIED, num_prefill=2, num_decode=2)


class TestBlame:
    """A wrong setting is told by its option or by its line, whichever it is from."""

    @pytest.mark.parametrize(
        ("text", "where"),
        [
            ("prefill:\n  count: 0\n", ":2: prefill.count: must be at least 1"),
            ("# one\nscheduler:\n  max_num_seqs: 0\n", ":3: scheduler.max_num_seqs: must be at"),
            ("decode:\n  scheduler:\n    max_loras: 2\n", ":3: decode.scheduler.max_loras: this"),
            ("scheduler:\n  max_num_seqs: 513\n", ":1: scheduler.max_num_batched_tokens: must be"),
            ("\nrouter:\n  policy: random\n", ":3: router.policy: 'random' is unknown"),
            ("cache:\n  kv_memory: 1\n", ":2: cache.kv_memory: 0.0 MiB hold 0 tokens"),
            ("cache: {kv_memory: 900TiB}", ":1: cache.kv_memory: 2 x 921600.0 GiB"),
            ("max_model_len: 2049", ":1: max_model_len: must be at most 2048"),
            ("gateway:\n  host: a..b", ":2: gateway.host: 'a..b' is not an address"),
            ("prefill:\n  scheduler:\n    enable_chunked_prefill: false\n",
             ":2: prefill.scheduler.max_num_batched_tokens: must be at least max_model_len"),
            ("tpology: 1", ":1: tpology: is unknown (did you mean topology?)"),
            ("scheduler: [1", ":1: is not YAML"),
        ],
    )  # fmt: skip
    def test_the_file(
        self, kvrelay: Kvrelay, tiny_model: Path, write: Write, text: str, where: str
    ) -> None:
        path = write(text)
        port = ("--port", "0")
        kvrelay("serve", tiny_model, *port, "--config", path).check_refused(f"{path}{where}")

    def test_an_option_over_it(self, kvrelay: Kvrelay, tiny_model: Path, write: Write) -> None:
        file = write("scheduler:\n  max_num_seqs: 4\n")
        ended = kvrelay("serve", tiny_model, "--port=0", "--config", file, "--max-num-seqs=0")
        ended.check_refused("error: --max-num-seqs: must be at least 1")

    def test_each_mistake_in_a_file_has_a_line(self, kvrelay: Kvrelay, write: Write) -> None:
        file = write("prefill:\n  count: one\nmax_model_len: two\n")
        ended = kvrelay("serve", "--config", file)
        assert (ended.status, ended.stderr.splitlines()) == (
            2,
            [
                f"error: {file}:2: prefill.count: must be a whole number, not 'one'",
                f"error: {file}:3: max_model_len: must be a whole number, not 'two'",
            ],
        )
