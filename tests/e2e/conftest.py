"""Servers that the tests of a session share. After each test nothing of its requests is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serve_process import REAL_MODEL, ServeProcess, run_kvrelay, serving
from tests.engine.tiny import tiny_model_dir

_FETCH_S = 280.0  # the first time it is downloaded and converted


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a Llama of random weights, for as many tokens as the real model."""
    folder = tmp_path_factory.mktemp("model")
    return tiny_model_dir(folder / "tiny-llama", max_position_embeddings=8192)


@pytest.fixture(scope="session")
def real_model() -> str:
    """The name of a model that is ready to be served."""
    fetched = run_kvrelay("models", "fetch", REAL_MODEL, timeout_s=_FETCH_S)
    assert fetched.returncode == 0, fetched.stderr
    assert (Path(fetched.stdout.strip()) / "config.json").is_file()
    return REAL_MODEL


@pytest.fixture(scope="session")
def shared_tiny_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("tiny-server")
    with serving(folder, tiny_model, "--kv-memory", "64MiB") as server:
        yield server


@pytest.fixture(scope="session")
def shared_real_server(
    tmp_path_factory: pytest.TempPathFactory, real_model: str
) -> Iterator[ServeProcess]:
    with serving(tmp_path_factory.mktemp("real-server"), real_model) as server:
        yield server


@pytest.fixture
def tiny_server(
    request: pytest.FixtureRequest, shared_tiny_server: ServeProcess
) -> Iterator[ServeProcess]:
    yield from _watched(request, shared_tiny_server)


@pytest.fixture
def server(
    request: pytest.FixtureRequest, shared_real_server: ServeProcess
) -> Iterator[ServeProcess]:
    """The real model, served with the settings that `kvrelay serve` has without options."""
    yield from _watched(request, shared_real_server)


def _watched(request: pytest.FixtureRequest, server: ServeProcess) -> Iterator[ServeProcess]:
    seen = len(server.errors)
    yield server
    said = server.errors[seen:]
    request.node.add_report_section("teardown", "kvrelay serve", said)
    assert server.is_running, server.log
    server.wait_until_at_rest()
    assert "Traceback" not in said, said
