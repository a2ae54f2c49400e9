"""A gateway with a scripted backend: in memory, or behind a real server on a free port."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from gateway import ChatTemplate, GatewayConfig, ServedModel, create_app
from telemetry import Metrics
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.gateway.scripted_backend import ScriptedBackend

MODEL = "scripted"
MAX_MODEL_LEN = 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Gateway:
    backend: ScriptedBackend
    directory: Path
    config: GatewayConfig = field(default_factory=GatewayConfig)
    max_model_len: int = MAX_MODEL_LEN
    template: str | None = TEMPLATE
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.model = ServedModel(
            name=MODEL,
            aliases=("alias/of-it",),
            max_model_len=self.max_model_len,
            tokenizer=byte_tokenizer(self.directory),
            chat_template=ChatTemplate(self.template, {}),
            created=1_700_000_000,
        )
        self.app: FastAPI = create_app(
            self.config, backend=self.backend, model=self.model, metrics=self.metrics
        )

    @asynccontextmanager
    async def client(self, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        """A client without a network. It sees an answer only when the answer is whole."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers
        ) as client:
            yield client

    @asynccontextmanager
    async def server(self, send_buffer_bytes: int | None = None) -> AsyncIterator["Server"]:
        """The gateway behind uvicorn, in this event loop."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if send_buffer_bytes is not None:  # connections inherit it
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            config = uvicorn.Config(
                self.app, ws="none", log_config=None, timeout_graceful_shutdown=5, lifespan="on"
            )
            server = Server(uvicorn.Server(config), listener.getsockname()[1])
            serving = asyncio.create_task(server.uvicorn.serve(sockets=[listener]))
            try:
                await until(lambda: server.uvicorn.started)
                yield server
            finally:
                server.uvicorn.should_exit = True
                await serving

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@dataclass
class Server:
    uvicorn: uvicorn.Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False)


def completion(prompt: object = "hi", **fields: object) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def chat(content: object = "hi", **fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def events(body: str) -> list[Any]:
    """The events of a stream, each parsed; checks that there is nothing but events."""
    assert body.endswith("\n\n")
    lines = body[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until `condition()` holds."""
    deadline = time.perf_counter() + timeout_s
    while not condition():
        assert time.perf_counter() < deadline, "it never came to that"
        await asyncio.sleep(0.005)
