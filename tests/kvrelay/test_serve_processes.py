"""`kvrelay serve --processes`: it answers, says what is wrong, and leaves no process behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.serve_process import REAL_MODEL, ServeProcess, run_kvrelay
from tests.engine.tiny import tiny_model_dir

_STOP_S = 10.0

Start = Callable[..., ServeProcess]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server; none outlives the test."""
    servers: list[ServeProcess] = []

    def start(*arguments: str | Path) -> ServeProcess:
        server = ServeProcess(tmp_path / "server", *arguments, "--processes", "--kv-memory=64MiB")
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.kill()


def test_it_answers_as_one_process_would(start: Start, tiny_model: Path) -> None:
    server = start(tiny_model)
    server.wait_until_ready()
    body = {"model": "tiny-llama", "prompt": [5, 6, 7] * 30, "max_tokens": 12, "temperature": 0}
    with server.client() as client:
        first = client.post("/v1/completions", json=body).raise_for_status().json()
        again = client.post("/v1/completions", json=body).raise_for_status().json()
    nodes = {node["node_id"]: node for node in server.cluster()["nodes"]}
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    assert first["usage"]["completion_tokens"] == 12
    assert set(nodes) == {"prefill-0", "decode-0"}
    assert nodes["prefill-0"]["transfers"]["committed"] == 2
    server.wait_until_at_rest()
    _check_it_stops(server)


def test_ctrl_c_while_the_nodes_start(start: Start, tiny_model: Path) -> None:
    server = start(tiny_model)
    server.wait_until_printed("model ")
    _check_it_stops(server)
    assert "ready" not in server.output


@pytest.mark.real_model
def test_ctrl_c_while_the_real_model_computes(start: Start) -> None:
    assert run_kvrelay("models", "fetch", REAL_MODEL, timeout_s=280.0).returncode == 0
    server = start(REAL_MODEL, "--max-model-len=1024")
    server.wait_until_ready()
    body = {"model": REAL_MODEL, "prompt": "Once upon a time", "max_tokens": 900, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        _check_it_stops(server)


def test_a_node_that_cannot_start_is_told_as_one_line(tmp_path: Path, tiny_model: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(f"model: {tiny_model}\nprocesses: true\nprefill:\n  cpus: [4096]\n")
    ended = run_kvrelay("serve", "--config", config, "--port=0")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {config}:4: prefill.cpus: must be some of [")
    assert ended.stderr.count("\n") == 1


def test_a_token_that_could_be_guessed(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.setenv("KVRELAY_CLUSTER_TOKEN", "short")
    ended = run_kvrelay("serve", tiny_model, "--port=0", "--processes")
    assert ended.returncode == 2
    assert "KVRELAY_CLUSTER_TOKEN: must have at least 16 characters" in ended.stderr
    assert "short" not in ended.stderr


def _check_it_stops(server: ServeProcess) -> None:
    """By Ctrl-C, which a terminal sends to all processes of the group."""
    os.killpg(server.pid, signal.SIGINT)
    assert server.wait(_STOP_S) == 0, server.log
    assert "Traceback" not in server.log, server.log
    assert server.errors == ""
    assert not server.has_descendants()
