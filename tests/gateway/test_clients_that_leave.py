"""Clients that disconnect, do not read, or are still there when the server stops."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import GatewayConfig
from protocol import GenerationRequest
from tests.gateway.byte_tokenizer import ids
from tests.gateway.gateway_under_test import Gateway, Server, chat, completion, events, until
from tests.gateway.scripted_backend import Script, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = 1_000_000


def endless(tmp_path: Path, config: GatewayConfig | None = None, **script: Any) -> Gateway:
    backend = ScriptedBackend(Script(**script))
    return Gateway(backend, tmp_path, config or GatewayConfig(), max_model_len=2 * ENDLESS)


async def connect(server: Server, body: dict[str, Any], path: str = COMPLETIONS) -> Any:
    """A connection with a request sent on it: reader and writer, with no client in between."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def assert_everything_ended(gateway: Gateway, outcome: str) -> None:
    streams = gateway.backend.streams
    await until(lambda: all(stream.closed.is_set() for stream in streams))
    live = gateway.app.state.live_requests
    await until(lambda: len(live) == 0)
    counted = {"endpoint": "completions", "outcome": outcome}
    await until(lambda: gateway.metric("kvrelay_requests_total", **counted) == 1)


async def test_a_disconnect_after_three_tokens(tmp_path: Path) -> None:
    gateway = endless(tmp_path, delay_s=0.01)
    async with gateway.server() as server, server.client() as client:
        body = completion(stream=True, max_tokens=ENDLESS)
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.aiter_lines()
            for _ in range(3):
                assert (await anext(lines)).startswith("data: ")
                assert await anext(lines) == ""
        left = time.perf_counter()
        (stream,) = gateway.backend.streams
        await asyncio.wait_for(stream.closed.wait(), 5)
        assert time.perf_counter() - left < 2
        await assert_everything_ended(gateway, "disconnected")
        assert stream.num_delivered < 400
        delivered = gateway.metric("kvrelay_generated_tokens_total")
        assert delivered == stream.num_delivered


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_disconnect_while_nothing_comes(tmp_path: Path, streams: bool, after: int) -> None:
    """No token wakes the gateway: it has to notice by itself."""
    gateway = endless(tmp_path, hang_after=after)
    async with gateway.server() as server:
        body = completion(stream=streams, max_tokens=ENDLESS)
        _, writer = await connect(server, body)
        await until(lambda: [s.num_delivered for s in gateway.backend.streams] == [after])
        writer.close()
        await assert_everything_ended(gateway, "disconnected")


async def test_a_disconnect_ends_every_choice(tmp_path: Path) -> None:
    gateway = endless(tmp_path, delay_s=0.005)
    async with gateway.server() as server:
        body = completion(["a", "b", "c", "d"], stream=True, max_tokens=ENDLESS)
        reader, writer = await connect(server, body)
        await reader.readuntil(b"data: ")
        writer.close()
        await assert_everything_ended(gateway, "disconnected")
        assert len(gateway.backend.streams) == 4


async def test_a_disconnect_while_the_request_is_being_admitted(tmp_path: Path) -> None:
    """The backend is told by the cancellation of `submit`."""
    cancelled = asyncio.Event()

    class Slow(ScriptedBackend):
        async def submit(self, request: GenerationRequest) -> Any:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    gateway = Gateway(Slow(), tmp_path)
    async with gateway.server() as server:
        _, writer = await connect(server, completion(stream=True))
        await until(lambda: len(gateway.app.state.live_requests) == 1)
        writer.close()
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_disconnect_within_the_body(tmp_path: Path) -> None:
    gateway = Gateway(ScriptedBackend(), tmp_path)
    async with gateway.server() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: g\r\nContent-Length: 99\r\n\r\n{{".encode()
        )
        await writer.drain()
        writer.close()
        await assert_everything_ended(gateway, "disconnected")
        assert gateway.backend.streams == []


async def test_a_client_that_does_not_read(tmp_path: Path) -> None:
    """What waits for it is bounded, and after a while it counts as gone."""
    config = GatewayConfig(send_timeout_s=0.3)
    gateway = endless(tmp_path, config, answer=ids("x" * 1000), chunk_tokens=1000)
    async with gateway.server(send_buffer_bytes=4096) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            body = json.dumps(completion(stream=True, max_tokens=ENDLESS)).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            await until(lambda: len(gateway.backend.streams) == 1)
            (stream,) = gateway.backend.streams
            await asyncio.wait_for(stream.closed.wait(), 20)
            # It stood still long before the million tokens were through.
            assert stream.num_delivered < ENDLESS // 4
            await assert_everything_ended(gateway, "disconnected")


async def test_a_slow_reader_is_served_to_the_end(tmp_path: Path) -> None:
    gateway = Gateway(ScriptedBackend(Script(delay_s=0.001)), tmp_path)
    async with gateway.server() as server, server.client() as client:
        body = completion(stream=True, max_tokens=20)
        seen = ""
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            async for text in response.aiter_text():
                seen += text
                await asyncio.sleep(0.01)
    assert events(seen)[-1] == "[DONE]"


async def test_a_connection_serves_one_request_after_the_other(tmp_path: Path) -> None:
    """Watching for a disconnect takes nothing from the next request on the connection."""
    gateway = Gateway(ScriptedBackend(), tmp_path)
    async with gateway.server() as server, server.client() as client:
        for number in range(10):
            body = completion("x" * (number + 1), max_tokens=2, stream=bool(number % 2))
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        assert len(server.uvicorn.server_state.connections) == 1


class TestShutdown:
    async def test_streams_end_at_once_and_say_why(self, tmp_path: Path) -> None:
        gateway = endless(tmp_path, delay_s=0.01)
        async with gateway.server() as server, server.client() as client:
            asking = [
                asyncio.create_task(client.post(path, json=body))
                for path, body in (
                    (COMPLETIONS, completion(stream=True, max_tokens=ENDLESS)),
                    (CHAT, chat(stream=True, max_tokens=ENDLESS)),
                    (COMPLETIONS, completion(max_tokens=ENDLESS)),
                )
            ]
            delivered = gateway.backend.streams
            await until(lambda: len(delivered) == 3 and all(s.num_delivered for s in delivered))
            began = time.perf_counter()
            gateway.app.state.live_requests.abort()
            streamed, chatted, whole = await asyncio.gather(*asking)
            assert time.perf_counter() - began < 3
            for response in (streamed, chatted):
                assert response.status_code == 200
                error = events(response.text)[-1]["error"]
                assert error["code"] == "aborted"
                assert "shutting down" in error["message"]
            assert whole.status_code == 503
            assert whole.json()["error"]["code"] == "aborted"
            late = await client.post(COMPLETIONS, json=completion())
            assert late.status_code == 503
        assert all(stream.closed.is_set() for stream in gateway.backend.streams)
        assert len(gateway.backend.streams) == 3

    async def test_a_server_with_a_grace_period_stops_by_itself(self, tmp_path: Path) -> None:
        """Without the hook: the server cancels what is left, and the streams are closed."""
        gateway = endless(tmp_path, delay_s=0.01)
        async with gateway.server() as server:
            server.uvicorn.config.timeout_graceful_shutdown = 1
            reader, writer = await connect(server, completion(stream=True, max_tokens=ENDLESS))
            await reader.readuntil(b"data: ")
        await assert_everything_ended(gateway, "aborted")
        writer.close()


async def test_many_clients_at_once(tmp_path: Path) -> None:
    """Each gets its own answer, whole; every third leaves early."""

    def script(request: GenerationRequest) -> Script:
        return Script(answer=request.prompt_token_ids, chunk_tokens=2, delay_s=0.002)

    gateway = Gateway(ScriptedBackend(script), tmp_path)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        prompt = f"client {number:02} "
        body = completion(prompt, stream=True, max_tokens=40)
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            if number % 3 == 0:
                await anext(response.aiter_bytes())
                return
            await response.aread()
        *chunks, done = events(response.text)
        assert done == "[DONE]"
        assert "".join(c["choices"][0]["text"] for c in chunks) == (prompt * 5)[:40]

    async with gateway.server() as server, server.client() as client:
        async with asyncio.TaskGroup() as group:
            for number in range(64):
                group.create_task(ask(client, number))
        await until(lambda: len(gateway.app.state.live_requests) == 0)
        gateway.backend.assert_nothing_left()
    assert len(gateway.backend.streams) == 64
