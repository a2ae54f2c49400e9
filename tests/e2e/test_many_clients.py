"""As many clients at once as a node has seats."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.e2e.serve_process import REAL_MODEL, ServeProcess

pytestmark = pytest.mark.real_model

NUM_CLIENTS = 64
MAX_TOKENS = 10


async def test_all_get_full_answers(server: ServeProcess) -> None:
    before = _counts(server)
    async with server.async_client(limits=httpx.Limits(max_connections=None)) as client:
        half = NUM_CLIENTS // 2
        whole = [_ask(client, number) for number in range(half)]
        streamed = [_ask_for_stream(client, number) for number in range(half, NUM_CLIENTS)]
        answers = await asyncio.gather(*whole, *streamed)
    for number, (text, usage) in enumerate(answers):
        assert text.startswith(f" {number + 6}, {number + 7}")
        assert usage["completion_tokens"] == MAX_TOKENS
    server.wait_until_at_rest()
    after = _counts(server)
    usages = [usage for _, usage in answers]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert after["generated"] - before["generated"] == NUM_CLIENTS * MAX_TOKENS
    assert after["computed"] - before["computed"] == _sum(usages, "prompt_tokens") - cached


def _body(number: int) -> dict[str, Any]:
    prompt = "".join(f" {n}," for n in range(number, number + 6))
    return {"model": REAL_MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}


async def _ask(client: httpx.AsyncClient, number: int) -> tuple[str, dict[str, Any]]:
    """Text and usage."""
    answer = (await client.post("/v1/completions", json=_body(number))).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    return answer["choices"][0]["text"], answer["usage"]


async def _ask_for_stream(client: httpx.AsyncClient, number: int) -> tuple[str, dict[str, Any]]:
    body = _body(number) | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    *chunks, last = [json.loads(line) for line in lines]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks), last["usage"]


def _counts(server: ServeProcess) -> dict[str, int]:
    """Tokens of all nodes together."""
    nodes = server.cluster()["nodes"]
    return {
        "generated": _sum(nodes, "num_generated_tokens"),
        "computed": _sum(nodes, "num_prompt_tokens_computed"),
    }


def _sum(items: list[dict[str, Any]], key: str) -> int:
    return sum(item[key] for item in items)
