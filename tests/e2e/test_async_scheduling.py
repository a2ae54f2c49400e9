"""Asynchronous and synchronous scheduling give the same tokens, whatever happens on the way.

The pool is so small that requests preempt each other, answers end at stop strings, and other
clients leave in the middle of theirs. The last two requests fit into the pool together, but not
with their answers: at the latest then somebody is preempted.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from engine.weights import ModelStore
from tests.e2e.serve_process import ServeProcess, serving
from tests.reference.cases import MODEL, NUM_OUTPUT_TOKENS, ReferenceCase, reference_cases

MAX_MODEL_LEN = 640
CASES = [c for c in reference_cases() if len(c.prompt_token_ids) + 48 <= MAX_MODEL_LEN]
POOL = "31MiB"  # 43 blocks, where the longest request needs 40
NUM_LEAVING = 12
LAST_PROMPTS = [[first, *CASES[-1].prompt_token_ids[:309]] for first in (7, 8)]  # 20 blocks each
NUM_LAST_TOKENS = 64  # four more of each


@pytest.fixture(scope="module")
def tokenizer(real_model: str) -> Tokenizer:
    files = ModelStore(Path.home() / ".cache" / "kvrelay").resolve(real_model)
    return Tokenizer.from_file(str(files.directory / "tokenizer.json"))


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", ["unified", "disaggregated"])
@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
async def test_tokens_are_the_same(
    real_model: str, tokenizer: Tokenizer, tmp_path: Path, topology: str, scheduling: str
) -> None:
    """Both are compared with the recorded tokens, so with each other."""
    assert len(CASES) >= 24
    options = (
        *("--topology", topology, scheduling, "--kv-memory", POOL, "--max-parked-blocks", "43"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"),
        *("--max-num-batched-tokens", "128"),
    )
    with serving(tmp_path, real_model, *options) as server:
        async with server.async_client() as client, asyncio.TaskGroup() as group:
            for number, case in enumerate(CASES):
                group.create_task(_check(client, case, tokenizer))
                if number % 2 == 0 and number // 2 < NUM_LEAVING:
                    group.create_task(_leave(client, case, after=1 + number % 7))
        async with server.async_client() as client:
            await asyncio.gather(*(_check_length(client, prompt) for prompt in LAST_PROMPTS))
        server.wait_until_at_rest()
        assert _num_preemptions(server) > 0


async def _check(client: httpx.AsyncClient, case: ReferenceCase, tokenizer: Tokenizer) -> None:
    comparable = case.output_token_ids[: case.comparable_length()]
    text = tokenizer.decode(comparable, skip_special_tokens=True)
    stop = _stop_string(text)
    answer = await client.post("/v1/completions", json=_body(case) | {"stop": [stop]}, timeout=300)
    choice = answer.raise_for_status().json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)], case.name
    assert choice["finish_reason"] == "stop"


async def _check_length(client: httpx.AsyncClient, prompt: list[int]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_LAST_TOKENS, "ignore_eos": True}
    answer = (await client.post("/v1/completions", json=body, timeout=300)).raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == NUM_LAST_TOKENS


async def _leave(client: httpx.AsyncClient, case: ReferenceCase, after: int) -> None:
    """Read some tokens of a stream and hang up: the request is in flight at that moment."""
    body = _body(case) | {
        "stream": True,
        "max_tokens": 400 - 48,
        "prompt": [7, *case.prompt_token_ids[:200]],
    }
    async with client.stream("POST", "/v1/completions", json=body, timeout=300) as answer:
        lines = (line async for line in answer.aiter_lines() if line)
        for _ in range(after):
            assert (await anext(lines)).startswith("data: {")


def _body(case: ReferenceCase) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": list(case.prompt_token_ids),
        "temperature": 0,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "ignore_eos": True,
    }


def _stop_string(text: str) -> str:
    """One that comes for the first time in the last third, in the middle of the words there."""
    candidates = (text[i : i + 4] for i in range(len(text) * 2 // 3, len(text) - 4))
    found = (s for s in candidates if text.index(s) >= len(text) // 3 and "\ufffd" not in s)
    return next(itertools.chain(found, [text[-1]]))


def _num_preemptions(server: ServeProcess) -> int:
    return sum(node["num_preemptions"] for node in server.cluster()["nodes"])
