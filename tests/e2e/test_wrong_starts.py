"""Commands that cannot be carried out: one line says why, the status is 2, and it is quick."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path

import pytest

from tests.e2e.serve_process import run_kvrelay
from tests.engine.weights.tiny_models import TinyGGUF

QUICKLY_S = 10.0  # it takes less than one, but the machine may be busy


def test_an_unknown_model() -> None:
    _check_fails("smollm3", words=("unknown model 'smollm3'", "smollm2-135m"))


def test_a_missing_model() -> None:
    _check_fails("./no-such-model", words=("./no-such-model: there is no such file",))


def test_a_gguf_file_that_is_cut_off(tmp_path: Path) -> None:
    model = TinyGGUF().write(tmp_path / "model.gguf")
    model.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    cache = tmp_path / "cache"
    _check_fails(model, "--cache-dir", cache, words=("model.gguf",))
    assert not list(cache.rglob("*.safetensors")), "nothing half-made is left"


def test_a_port_in_use_is_told_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        _check_fails("./no-such-model", "--port", port, words=("--port", port, "in use"))


def test_a_host_of_another_machine() -> None:
    _check_fails("./no-such-model", "--host", "192.0.2.1", words=("--host", "192.0.2.1"))


@pytest.mark.real_model
class TestRealModel:
    def test_safetensors_cut_off(self, real_model: str, tmp_path: Path) -> None:
        where = Path(run_kvrelay("models", "fetch", real_model).stdout.strip())
        model = tmp_path / "cut-off"
        model.mkdir()
        for path in where.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, model)
        with (where / "model.safetensors").open("rb") as weights:
            (model / "model.safetensors").write_bytes(weights.read(1 << 20))
        _check_fails(model, words=("model.safetensors", "promises"))

    def test_too_little_memory_for_one_request(self, real_model: str) -> None:
        """360 MiB and the null block are the least."""
        words = ("--kv-memory", "8192", "360.7 MiB")
        _check_fails(real_model, "--kv-memory", "360MiB", words=words)


def _check_fails(model: str | Path, *options: str | Path, words: tuple[str, ...]) -> None:
    began = time.monotonic()
    done = run_kvrelay("serve", "--port", "0", model, *options)
    assert time.monotonic() - began < QUICKLY_S
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
