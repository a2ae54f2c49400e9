"""Bytes of all kinds thrown at the HTTP port, most of them near to what it understands."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import GatewayConfig
from tests.gateway.gateway_under_test import Gateway, Server, chat, completion
from tests.gateway.scripted_backend import ScriptedBackend

KEY = "sk-the-key"
TIMEOUT_S = 10.0
MAX_GROWTH_BYTES = 32 << 20
ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/pause"]


class ServedGateway:
    """In a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self.gateway = Gateway(ScriptedBackend(), directory, GatewayConfig(api_keys=(KEY,)))
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(TIMEOUT_S)
        self.client = httpx.Client(
            base_url=self.server.url,
            headers={"Authorization": f"Bearer {KEY}"},
            trust_env=False,
            timeout=TIMEOUT_S,
        )

    async def _serve(self) -> None:
        async with self.gateway.server() as server:
            self.server: Server = server
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._started.set()
            await self._stop.wait()

    def close(self) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def answers(self, said: list[bytes], *, to_the_end: bool) -> bytes:
        """All that comes back, if we wait for it."""
        answers = b""
        with (
            contextlib.suppress(OSError),  # it may close whenever it likes
            socket.create_connection(("127.0.0.1", self.server.port), TIMEOUT_S) as opened,
        ):
            for chunk in said:
                opened.sendall(chunk)
            opened.shutdown(socket.SHUT_WR)
            while to_the_end and (chunk := opened.recv(1 << 16)):
                answers += chunk
        return answers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    served = ServedGateway(tmp_path_factory.mktemp("gateway"))
    yield served
    served.close()


def request(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: g", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + body


noise = st.binary(max_size=3000)
texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
fields = st.dictionaries(
    st.sampled_from(
        [
            *("prompt", "messages", "model", "max_tokens", "n", "stop", "stream", "temperature"),
            *("seed", "min_p", "min_tokens", "logit_bias", "logprobs", "top_logprobs"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
        ]
    ),
    values,
    max_size=5,
)
bodies = noise | st.builds(
    lambda body, changed: json.dumps(body | changed).encode(),
    st.sampled_from([completion(), chat()]),
    fields,
)
methods = st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS"])
paths = st.sampled_from(ROUTES) | texts.map(lambda text: "/" + text)
headers = st.lists(
    st.tuples(
        st.sampled_from(["Authorization", "Transfer-Encoding", "Expect", "X-Request-Id", "Range"]),
        texts | st.sampled_from(["chunked", "100-continue", "Bearer ", "Bearer sk-wrong"]),
    ),
    max_size=3,
)
requests = st.builds(request, methods, paths, headers, bodies)
cut = st.builds(lambda whole, n: whole[: n % (len(whole) + 1)], requests, st.integers(0, 5000))


@settings(max_examples=200, deadline=None)
@given(said=st.lists(noise | requests | cut, max_size=4), to_the_end=st.booleans())
def test_nothing_is_generated_without_the_key(
    served: ServedGateway, said: list[bytes], to_the_end: bool
) -> None:
    answers = served.answers(said, to_the_end=to_the_end)
    assert answers == b"" or answers.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500 " not in answers
    assert served.gateway.backend.streams == []


@settings(max_examples=80, deadline=None)
@given(path=st.sampled_from(ROUTES[:2]), body=bodies)
def test_whatever_the_body_it_is_refused_or_answered(
    served: ServedGateway, path: str, body: bytes
) -> None:
    answer = served.client.post(path, content=body)
    assert answer.status_code in (200, 400, 404)
    if answer.status_code != 200:
        assert list(answer.json()["error"]) == ["message", "type", "param", "code"]
    served.gateway.backend.streams.clear()


def test_many_who_say_nothing_hold_up_nobody(served: ServedGateway) -> None:
    memory = psutil.Process().memory_info().rss
    with contextlib.ExitStack() as stack:
        for n in range(200):
            silent = socket.create_connection(("127.0.0.1", served.server.port), TIMEOUT_S)
            stack.enter_context(silent).sendall(b"POST /v1/completions HTTP/1.1\r\n"[: n % 30])
        assert served.client.get("/v1/models").status_code == 200
    assert psutil.Process().memory_info().rss < memory + MAX_GROWTH_BYTES
