"""Other shapes and sizes of the cluster give the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serve_process import ServeProcess, serving

# The prompts have several blocks, the second one begins like the first, the last one is short.
TINY_PROMPTS = ("one two three " * 20, "one two three " * 15 + "four", "hi")
REAL_PROMPTS = (
    "Q: What is the capital of France?\nA: The capital of France is",
    "Q: What is the capital of France?\nA: Paris.\nQ: And of Italy?\nA: The capital of Italy is",
    " 1, 2, 3, 4, 5, 6, 7, 8, 9,",
)
REAL_ANSWERS = (" Paris.", " Rome.", " 10, 11,")

SMALL_STEPS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "4")


@pytest.mark.slow
class TestTinyModel:
    @pytest.fixture
    def expected(self, tiny_server: ServeProcess) -> list[str]:
        return _answers(tiny_server, "tiny-llama", TINY_PROMPTS)

    @pytest.mark.parametrize(
        "options",
        [
            ("--topology", "unified", *SMALL_STEPS),
            ("--prefill", "2", "--decode", "2", "--no-prefix-caching", *SMALL_STEPS),
        ],
        ids=["unified", "2 + 2"],
    )
    def test(
        self, tiny_model: Path, tmp_path: Path, expected: list[str], options: tuple[str, ...]
    ) -> None:
        with serving(tmp_path, tiny_model, "--kv-memory", "64MiB", *options) as server:
            assert _answers(server, "tiny-llama", TINY_PROMPTS) == expected
            server.wait_until_at_rest()


@pytest.mark.real_model
class TestRealModel:
    @pytest.mark.parametrize(
        ("options", "nodes"),
        [
            (("--topology", "unified"), ["unified-0"]),
            (
                ("--prefill", "2", "--decode", "2", "--policy", "round_robin", *SMALL_STEPS),
                ["prefill-0", "prefill-1", "decode-0", "decode-1"],
            ),
        ],
        ids=["unified", "2 + 2"],
    )
    def test(
        self, real_model: str, tmp_path: Path, options: tuple[str, ...], nodes: list[str]
    ) -> None:
        with serving(tmp_path, real_model, *options) as server:
            answers = _answers(server, real_model, REAL_PROMPTS)
            for answer, beginning in zip(answers, REAL_ANSWERS, strict=True):
                assert answer.startswith(beginning)
            server.wait_until_at_rest()
            cluster = server.cluster()
        assert [node["node_id"] for node in cluster["nodes"]] == nodes
        assert all(node["num_generated_tokens"] for node in cluster["nodes"]), "each node worked"


def test_all_options(tiny_model: Path, tmp_path: Path) -> None:
    options = (
        *("--host", "localhost", "--api-key", "sk-1", "--api-key", "sk-2", "--log-level", "info"),
        *("--kv-memory", "16MiB", "--block-size", "32", "--max-num-seqs", "3"),
        *("--max-num-batched-tokens", "48", "--max-model-len", "100", "--no-prefix-caching"),
        *("--policy", "round_robin", "--cache-dir", str(tmp_path / "cache")),
    )
    with serving(tmp_path, tiny_model, *options) as server:
        assert "INFO" in server.errors
        with server.client() as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/cluster").status_code == 401
            assert client.get("/health").status_code == 200
        with server.client(headers={"Authorization": "Bearer sk-2"}) as client:
            body: dict[str, Any] = {"model": "tiny-llama", "prompt": "ab " * 25, "max_tokens": 4}
            for _ in range(2):
                usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            nodes = client.get("/cluster").raise_for_status().json()["nodes"]
    for node in nodes:
        assert node["block_size"] == 32
        assert node["max_num_seqs"] == 3
        assert node["max_num_batched_tokens"] == 48
        assert node["max_model_len"] == 100
        assert node["blocks"]["cached"] == 0


def _answers(server: ServeProcess, model: str, prompts: tuple[str, ...]) -> list[str]:
    """The prompts one after another, and then all at once: the same answers."""
    with server.client() as client:
        single = [_ask(client, model, prompt)[0] for prompt in prompts]
        assert _ask(client, model, prompts) == single
    return single


def _ask(client: Any, model: str, prompt: str | tuple[str, ...]) -> list[str]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 8}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return [choice["text"] for choice in answer["choices"]]
