"""What somebody sees who tries the server with curl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pytest

from tests.e2e.serve_process import REAL_MODEL, ServeProcess

pytestmark = pytest.mark.real_model

QUESTION = {
    "model": REAL_MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


def test_a_question(server: ServeProcess) -> None:
    answer = json.loads(_curl(server, QUESTION))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_chunks_come_while_generation_goes_on(server: ServeProcess) -> None:
    body = QUESTION | {"stream": True, "max_tokens": 48}
    body["messages"] = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
    num_running = []
    with _curl_stream(server, body) as lines:
        first, second = _event(next(lines)), _event(next(lines))
        num_running.append(server.cluster()["num_requests"])
        rest = [_event(line) for line in lines]
        num_running.append(server.cluster()["num_requests"])
    assert num_running == [1, 0], "the first chunks came before the answer was complete"
    assert rest[-1] == "[DONE]"
    chunks = [first, second, *rest[:-1]]
    assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == [None, "length"]
    words = [c["choices"][0]["delta"]["content"] for c in chunks]
    assert len([word for word in words if word]) > 24, "tokens came in lumps"
    assert first["choices"][0]["delta"]["role"] == "assistant"


def test_an_error_has_its_status(server: ServeProcess) -> None:
    written = _curl(server, QUESTION | {"model": "gpt-5"}, "--write-out", "\n%{http_code}")
    body, status = written.rsplit("\n", 1)
    assert status == "404"
    assert REAL_MODEL in json.loads(body)["error"]["message"], "the error names what is served"


def _curl(server: ServeProcess, body: dict[str, Any], *options: str) -> str:
    command = [*_command(server, body), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@contextmanager
def _curl_stream(server: ServeProcess, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines that curl prints, as it prints them."""
    command = [*_command(server, body), "--no-buffer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout is not None
        yield _lines(curl.stdout)
    assert curl.returncode == 0


def _lines(output: IO[str]) -> Iterator[str]:
    return (line.strip() for line in output if line.strip())


def _command(server: ServeProcess, body: dict[str, Any]) -> list[str]:
    return [
        *("curl", "--silent", "--show-error", "--noproxy", "*"),
        f"{server.url}/v1/chat/completions",
        *("--header", "Content-Type: application/json", "--data", json.dumps(body)),
    ]


def _event(line: str) -> Any:
    payload = line.removeprefix("data: ")
    assert payload != line, line
    return payload if payload == "[DONE]" else json.loads(payload)
