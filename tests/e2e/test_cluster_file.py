"""A server that is told by a file what to serve."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.serve_process import serving
from tests.engine.tiny import tiny_model_dir


def test_it_serves_what_the_file_says(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path / "tiny-llama")
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"model: {model}\n"
        "decode: {count: 2, scheduler: {max_num_seqs: 3}}\n"
        "scheduler: {max_num_seqs: 5, max_num_batched_tokens: 40}\n"
        "cache: {num_blocks: 77, block_size: 32}\n"
        "max_model_len: 128\n"
        "gateway: {port: 1}\n"  # the option wins, or it could not listen
    )
    with serving(tmp_path / "server", "--config", file) as server:
        nodes = {node["node_id"]: node for node in server.cluster()["nodes"]}
        with server.client() as client:
            body = {"model": "tiny-llama", "prompt": [5, 6, 7], "max_tokens": 3}
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
    assert {name: node["max_num_seqs"] for name, node in nodes.items()} == {
        "prefill-0": 5,
        "decode-0": 3,
        "decode-1": 3,
    }
    for node in nodes.values():
        assert (node["num_blocks"], node["block_size"]) == (77, 32)
    assert answer["usage"]["prompt_tokens"] == 3
