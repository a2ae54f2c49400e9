"""The command line in this process: what it prints, what it refuses, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from kvrelay import __version__, cli
from tests.engine.weights.tiny_models import TinyGGUF
from tests.kvrelay.command import Ended, Kvrelay

# Values that each option refuses, for a model of at most 2048 tokens.
WRONG: dict[str, tuple[str, ...]] = {
    "--config": ("", "/nowhere.yaml", "/dev/null/a.yaml", "/"),
    "--topology": ("", "mixed", "UNIFIED"),
    "--prefill": ("0", "-1", "two", "1.5", ""),
    "--decode": ("0", "-1", "two"),
    "--host": ("", "a..b", "192.0.2.1"),
    "--unified": ("-1", "two"),
    "--port": ("-1", "65536", "http", ""),
    "--block-size": ("0", "-16", "8", "17", "big"),
    "--kv-memory": ("", "0", "1", "1MiB", "-1GiB", "lots", "900TiB", "9" * 400),
    "--max-num-seqs": ("0", "-1", "many", "1e3"),
    "--max-num-batched-tokens": ("0", "-1", "63", "many"),
    "--max-num-scheduled-tokens": ("0", "-1", "513", "many"),
    "--long-prefill-token-threshold": ("-1", "2049", "long", ""),
    "--max-num-partial-prefills": ("0", "-1", "many"),
    "--max-long-partial-prefills": ("0", "-1", "many"),
    "--scheduling-policy": ("", "lifo", "FCFS"),
    "--max-parked-blocks": ("0", "-1", "half"),
    "--kv-load-failure-policy": ("", "retry"),
    "--transport": ("", "tcp", "SHM"),
    "--on-transfer-failure": ("", "never", "RETRY"),
    "--max-loras": ("0", "-1", "some", "1"),  # the engine has no adapters
    "--spec-method": ("", "medusa"),
    "--num-speculative-tokens": ("-1", "1", "few"),  # without a method there are none
    "--max-model-len": ("0", "1", "-1", "2049", "long"),
    "--policy": ("", "random", "KV_AWARE"),
    "--api-key": ("",),
    "--cache-dir": ("/dev/null",),
    "--record-schedules": ("/dev/null",),
    "--log-level": ("", "loud", "10"),
    "--threads": ("0", "-1", "two", ""),
    "--device": ("", "gpu", "cuda:x", "CPU"),
    "--dtype": ("", "float64", "bfloat16"),  # on a CPU
    "--kv-cache-dtype": ("", "int8", "float16"),
    "--quantization": ("", "int4", "INT8"),
    "--kernels": ("", "fast", "TORCH"),
    "--attention": ("", "fast", "flashinfer"),
}
FLAGS = (
    "async-scheduling",
    "batch-invariant",
    "checksums",
    "enable-chunked-prefill",
    "layerwise",
    "prefix-caching",
    "processes",
    "scheduler-reserve-full-isl",
    "waiting-preempts-running",
)
# Flags and what only asks.
WITHOUT_VALUE = {f"--{prefix}{flag}" for flag in FLAGS for prefix in ("", "no-")} | {"--help"}


def test_version(kvrelay: Kvrelay) -> None:
    assert kvrelay("version") == Ended(0, f"kvrelay {__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("models",)], ids=str)
def test_without_a_command_it_helps(kvrelay: Kvrelay, arguments: tuple[str, ...]) -> None:
    ended = kvrelay(*arguments)
    assert (ended.status, ended.stderr) == (2, "")
    assert "Usage: kvrelay" in ended.stdout


@pytest.mark.parametrize("command", ["", "serve", "models", "version"])
def test_help(kvrelay: Kvrelay, command: str) -> None:
    ended = kvrelay(*command.split(), "--help")
    assert (ended.status, ended.stderr) == (0, "")
    assert f"Usage: kvrelay {command}".rstrip() in ended.stdout


class TestServe:
    @pytest.mark.parametrize(
        ("option", "value"),
        [(option, value) for option, values in WRONG.items() for value in values],
        ids=lambda text: text[:12] or "empty",
    )
    def test_a_wrong_value(
        self, kvrelay: Kvrelay, tiny_model: Path, option: str, value: str
    ) -> None:
        ended = kvrelay("serve", tiny_model, "--port", "0", f"{option}={value}")
        ended.check_refused(option)

    def test_every_option_is_tried(self) -> None:
        assert set(WRONG) | WITHOUT_VALUE == _options("serve") | {"--help"}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--waiting-preempts-running",), ("--waiting-preempts-running", "priority")),
            (("--max-num-seqs", "513"), ("--max-num-batched-tokens", "max_num_seqs (513)")),
            (("--no-enable-chunked-prefill",), ("--max-num-batched-tokens", "chunked prefill")),
            (("--max-long-partial-prefills=2", "--max-num-partial-prefills=1"),
             ("--max-long-partial-prefills", "max_num_partial_prefills (1)")),
            (("--spec-method=ngram", "--num-speculative-tokens=2", "--no-async-scheduling"),
             ("--spec-method", "no draft tokens yet")),
            (("--spec-method=ngram", "--num-speculative-tokens=2"),
             ("--spec-method", "no draft tokens yet")),
            (("--spec-method=ngram", "--num-speculative-tokens=2", "--async-scheduling"),
             ("--async-scheduling", "must be off with draft tokens")),
            (("--processes", "--transport=memory"), ("--transport", "within one process")),
            (("--topology=unified", "--prefill=1"), ("--prefill", "a unified cluster has none")),
            (("--batch-invariant", "--kernels=torch"), ("--batch-invariant", "needs the compiled")),
            (("--device=cuda", "--batch-invariant"), ("--batch-invariant", "for device cpu")),
            (("--device=cuda:0", "--quantization=int8"), ("--quantization", "for device cpu only")),
            (("--device=cuda", "--kernels=torch"), ("--kernels", "for device cpu")),
            (("--device=cuda", "--dtype=float32"), ("--dtype", "auto, bfloat16, float16")),
            (("--device=cuda", "--kv-cache-dtype=float32"), ("--kv-cache-dtype", "auto, bfloat16")),
        ],
        ids=str,
    )  # fmt: skip
    def test_values_that_cannot_go_together(
        self, kvrelay: Kvrelay, tiny_model: Path, options: tuple[str, ...], words: tuple[str, ...]
    ) -> None:
        kvrelay("serve", tiny_model, "--port", "0", *options).check_refused(*words)

    def test_an_unknown_option(self, kvrelay: Kvrelay) -> None:
        ended = kvrelay("serve", "--prefil", "2")
        ended.check_refused("--prefil", "--prefill")  # what was meant

    def test_a_superfluous_argument(self, kvrelay: Kvrelay) -> None:
        kvrelay("serve", "smollm2-135m", "llama").check_refused("llama")

    def test_an_unknown_model(self, kvrelay: Kvrelay) -> None:
        ended = kvrelay("serve", "smollm2", "--port", "0")
        ended.check_refused("did you mean 'smollm2-135m'?")


class TestModels:
    def test_list(self, kvrelay: Kvrelay) -> None:
        assert kvrelay("models", "list") == Ended(0, "smollm2-135m\n", "")

    def test_fetch_prints_where_it_lies(self, kvrelay: Kvrelay, tiny_model: Path) -> None:
        assert kvrelay("models", "fetch", tiny_model) == Ended(0, f"{tiny_model}\n", "")

    def test_fetch_of_what_is_not_there(self, kvrelay: Kvrelay, tmp_path: Path) -> None:
        ended = kvrelay("models", "fetch", tmp_path / "model.gguf")
        assert ended.stdout == ""
        ended.check_refused("model.gguf")


class TestCacheDirectory:
    @pytest.fixture
    def gguf(self, tmp_path: Path) -> Path:
        """It is converted into the cache, which shows where that is."""
        return TinyGGUF().write(tmp_path / "tiny.gguf")

    def test_as_said(self, kvrelay: Kvrelay, gguf: Path, tmp_path: Path) -> None:
        ended = kvrelay("models", "fetch", gguf, "--cache-dir", tmp_path / "said")
        assert Path(ended.stdout.strip()).is_relative_to(tmp_path / "said" / "gguf")

    def test_of_the_environment(
        self, kvrelay: Kvrelay, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        ended = kvrelay("models", "fetch", gguf)
        assert Path(ended.stdout.strip()).is_relative_to(tmp_path / "xdg" / "kvrelay")
        monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "ours"))
        ended = kvrelay("models", "fetch", gguf)
        assert Path(ended.stdout.strip()).is_relative_to(tmp_path / "ours")

    def test_of_the_user(
        self, kvrelay: Kvrelay, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        ended = kvrelay("models", "fetch", gguf)
        where = Path(ended.stdout.strip())
        assert where.is_relative_to(tmp_path / "home" / ".cache" / "kvrelay")
        ended = kvrelay("models", "fetch", gguf, "--cache-dir", "~/mine")
        assert Path(ended.stdout.strip()).is_relative_to(tmp_path / "home" / "mine")


def _options(command: str) -> set[str]:
    group = typer.main.get_command(cli.app)
    parameters = getattr(group, "commands")[command].params  # noqa: B009 (no type has it)
    return {
        name
        for parameter in parameters
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    }
