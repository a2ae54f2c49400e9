"""A server that records, and is killed: what is on the disk replays."""

from __future__ import annotations

import stat
from pathlib import Path

from scheduler.replay import load, replay
from tests.e2e.serve_process import ServeProcess
from tests.engine.tiny import tiny_model_dir

_NODES = ("decode-0", "prefill-0")


def test_what_a_killed_server_recorded(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "tiny-llama")
    directory = tmp_path / "recordings"
    server = ServeProcess(tmp_path / "server", model, "--record-schedules", directory)
    try:
        server.wait_until_ready()
        with server.client() as client:
            for length in (5, 40):
                body = {"model": "tiny-llama", "prompt": [5] * length, "max_tokens": 4}
                client.post("/v1/completions", json=body).raise_for_status()
    finally:
        server.kill()
    paths = {path.stem: path for path in directory.iterdir()}
    assert paths.keys() == set(_NODES)
    for name, path in paths.items():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        trace = load(path)
        assert trace.name == name
        added = [request for step in trace.steps for request in step.add]
        assert [len(request.prompt_token_ids) for request in added] == [5, 40]
        assert replay(trace, exact_blocks=True) is None
