"""Ctrl-C and SIGTERM: the server ends soon, in order, and tells the clients that it does."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.serve_process import ServeProcess, until

STOP_S = 5.0
NUM_CLIENTS = 8

_BETWEEN_S = 0.1  # two signals; the second one arrives in the middle of stopping

Start = Callable[..., ServeProcess]
Numbers = tuple[signal.Signals, ...]

stops = pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)],
    ids=["SIGTERM", "Ctrl-C twice"],
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server in its own folder; none outlives the test."""
    servers: list[ServeProcess] = []

    def start(*arguments: str | Path) -> ServeProcess:
        servers.append(ServeProcess(tmp_path / f"server-{len(servers)}", *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@stops
def test_while_it_starts(start: Start, tiny_model: Path, numbers: Numbers) -> None:
    server = start(tiny_model)
    server.wait_until_printed("model ")  # from here on torch loads, which takes longest
    _check_it_stops(server, numbers)
    assert "ready" not in server.output
    assert server.errors == ""


@stops
def test_while_nothing_runs(start: Start, tiny_model: Path, numbers: Numbers) -> None:
    server = start(tiny_model)
    server.wait_until_ready()
    with server.client() as client:  # a connection that is kept alive
        assert client.get("/health").status_code == 200
        _check_it_stops(server, numbers)
    assert server.output.endswith("stopped\n")
    assert server.errors == ""


def test_nodes_that_hang_are_killed_at_the_second_ctrl_c(start: Start, tiny_model: Path) -> None:
    server = start(tiny_model, "--processes")
    server.wait_until_ready()
    nodes = psutil.Process(server.pid).children()
    assert len(nodes) == 2
    for node in nodes:
        node.suspend()
    server.send(signal.SIGINT)
    time.sleep(5 * _BETWEEN_S)
    assert server.is_running
    _check_it_stops(server, (signal.SIGINT,))
    assert server.output.endswith("stopped\n")


@stops
async def test_while_requests_run(start: Start, tiny_model: Path, numbers: Numbers) -> None:
    await _check_it_stops_under_load(start(tiny_model), "tiny-llama", numbers, max_tokens=2000)


@pytest.mark.real_model
async def test_while_the_real_model_computes(start: Start, real_model: str) -> None:
    numbers = (signal.SIGINT, signal.SIGINT)
    await _check_it_stops_under_load(start(real_model), real_model, numbers, max_tokens=4000)


async def _check_it_stops_under_load(
    server: ServeProcess, model: str, numbers: Numbers, max_tokens: int
) -> None:
    await asyncio.to_thread(server.wait_until_ready)
    body = {"model": model, "prompt": "a b c", "max_tokens": max_tokens, "ignore_eos": True}
    async with server.async_client() as client:
        half = NUM_CLIENTS // 2
        streams = [asyncio.create_task(_last_event(client, body)) for _ in range(half)]
        others = [asyncio.create_task(_answer(client, body)) for _ in range(half)]
        await asyncio.to_thread(_wait_until_all_run, server)
        await asyncio.to_thread(_check_it_stops, server, numbers)
        for event in await asyncio.gather(*streams):
            assert event["error"]["code"] == "aborted"
            assert "shutting down" in event["error"]["message"]
        for answer in await asyncio.gather(*others):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "aborted"
    assert server.output.endswith("stopped\n")


def _wait_until_all_run(server: ServeProcess) -> None:
    def all_run() -> bool:
        return server.node("decode")["queues"]["running"] == NUM_CLIENTS

    until(all_run, "all requests run")


async def _last_event(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line]
    return json.loads(lines[-1].removeprefix("data: "))


async def _answer(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post("/v1/completions", json=body)


def _check_it_stops(server: ServeProcess, numbers: Numbers) -> None:
    for number in numbers:
        server.send(number)
        time.sleep(_BETWEEN_S)
    assert server.wait(STOP_S) == 0, server.log
    assert "Traceback" not in server.log, server.log
    assert not server.has_descendants()
