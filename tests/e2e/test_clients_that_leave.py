"""Clients that hang up: their requests end on every node at once, and give their blocks back."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.serve_process import REAL_MODEL, ServeProcess, until

# Without the hang-up it would take minutes.
LONG = {"model": REAL_MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
# Steps that a node may still begin: measured in seconds, a busy machine would make a difference.
FEW_STEPS = 50


@pytest.mark.slow
async def test_at_any_moment(tiny_server: ServeProcess) -> None:
    """Some leave in the very turn of the event loop that has a token for them."""
    rng = random.Random(0)
    body = LONG | {"model": "tiny-llama", "stream": True}
    async with tiny_server.async_client(limits=httpx.Limits(max_connections=None)) as client:
        for _ in range(6):
            after_s = [0.5 * rng.random() for _ in range(32)]
            await asyncio.gather(*(_leave(client, body, seconds) for seconds in after_s))
    _check_soon_at_rest(tiny_server)


async def _leave(client: httpx.AsyncClient, body: dict[str, Any], after_s: float) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert (await anext(answer.aiter_lines())).startswith("data: {")
        await asyncio.sleep(after_s)


@pytest.mark.real_model
class TestRealModel:
    def test_after_three_tokens_of_a_stream(self, server: ServeProcess) -> None:
        body = LONG | {"stream": True}
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            events = (line for line in answer.iter_lines() if line)
            for _ in range(3):
                assert next(events).startswith("data: ")
            assert server.node("decode")["blocks"]["used"] > 0
        _check_all_is_gone(server)

    def test_while_an_answer_is_made(self, server: ServeProcess) -> None:
        with _posted(server, LONG):
            until(lambda: server.node("decode")["queues"]["running"], "it runs")
        _check_all_is_gone(server)

    def test_while_its_prompt_is_computed(self, server: ServeProcess) -> None:
        body = LONG | {"prompt": [[n % 1000 + 100 for n in range(4000)]]}
        with _posted(server, body):
            until(lambda: server.node("prefill")["queues"]["running"], "it runs")
            before = server.node("prefill")["num_prompt_tokens_computed"]
        _check_all_is_gone(server)
        assert server.node("prefill")["num_prompt_tokens_computed"] < before + 4000

    def test_many_at_once(self, server: ServeProcess) -> None:
        """Some are decoded, some computed, and some wait for both."""
        with ExitStack() as connections:
            for number in range(6):
                body = LONG | {"prompt": f"{number} times " * 60}
                connections.enter_context(_posted(server, body))
            until(lambda: server.node("decode")["queues"]["running"], "the first one is decoded")
        _check_all_is_gone(server)

    def test_within_its_own_request(self, server: ServeProcess) -> None:
        with socket.create_connection(_address(server)) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head.encode() + b'{"model": ')
        _check_all_is_gone(server)


def _check_soon_at_rest(server: ServeProcess) -> None:
    before = _num_steps(server)
    server.wait_until_at_rest()
    assert _num_steps(server) <= before + FEW_STEPS


def _num_steps(server: ServeProcess) -> int:
    return sum(node["num_steps"] for node in server.cluster()["nodes"])


def _check_all_is_gone(server: ServeProcess) -> None:
    _check_soon_at_rest(server)
    with server.client() as client:
        body = {"model": REAL_MODEL, "prompt": "hi", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200


@contextmanager
def _posted(server: ServeProcess, body: dict[str, Any]) -> Iterator[None]:
    """A request whose connection is closed at the end, its answer unread."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(_address(server)) as connection:
        connection.sendall(head.encode() + content)
        yield


def _address(server: ServeProcess) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)
