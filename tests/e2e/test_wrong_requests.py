"""Requests that cannot be served: each learns why, and costs the server nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.serve_process import ServeProcess

COMPLETION: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

# Body, the field that the error names, and words of its message.
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_tokens": -1}, "max_tokens", ">= 1"),
    ({"max_tokens": 10**9}, "max_tokens", "maximum length"),
    ({"max_tokens": "two"}, "max_tokens", "got `str`"),
    ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": 5}, "prompt", "Expected"),
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": [1, "a"]}, "prompt", "mixed"),
    ({"prompt": [-1]}, "prompt[0]", "not in the vocabulary"),
    ({"prompt": ["a"] * 65}, "prompt", "more than 64"),
    ({"temperature": -1}, "temperature", ">= 0"),
    ({"temperature": "hot"}, "temperature", "`float`"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"stop": [""]}, "stop[0]", ">= 1"),
    ({"stream": "yes"}, "stream", "`bool`"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only a stream"),
    ({"max_tokns": 5}, "max_tokns", "no such field"),
    ({"n": 129}, "n", "<= 128"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"logit_bias": {"5": 200}}, "logit_bias", "-100 to 100"),
    ({"min_p": 2}, "min_p", "<= 1.0"),
    ({"logprobs": 21}, "logprobs", "<= 20"),
    ({"kv_transfer_params": {}}, "kv_transfer_params", "not supported"),
]
WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": "hi"}, "messages", "`array`"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "`content`"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", "king"),
    ({"max_completion_tokens": 3}, "max_tokens", "disagree"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
]


class WrongRequests:
    """What a model has a say in. What is at rest before is at rest after; the server says so."""

    @pytest.fixture
    def model(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def client(self, server: ServeProcess) -> Iterator[httpx.Client]:
        with server.client() as client:
            yield client

    def test_a_token_that_is_not_in_the_vocabulary(self, client: httpx.Client, model: str) -> None:
        answer = client.post("/v1/completions", json={"model": model, "prompt": [10**6]})
        assert (answer.status_code, _error(answer)["param"]) == (400, "prompt[0]")
        assert "not in the vocabulary" in _error(answer)["message"]
        self._check_it_serves(client, model)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_that_is_too_long(
        self, client: httpx.Client, server: ServeProcess, model: str, stream: bool
    ) -> None:
        limit = server.cluster()["nodes"][0]["max_model_len"]
        prompt = [100] * (limit + 7)
        body = {"model": model, "prompt": prompt, "stream": stream}
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, _error(answer)["code"]) == (400, "prompt_too_long")
        assert str(limit + 7) in _error(answer)["message"]
        assert str(limit) in _error(answer)["message"]
        self._check_it_serves(client, model)

    def test_a_model_that_is_not_served(self, client: httpx.Client, model: str) -> None:
        answer = client.post("/v1/chat/completions", json={**CHAT, "model": "gpt-5"})
        assert (answer.status_code, _error(answer)["code"]) == (404, "model_not_found")
        assert model in _error(answer)["message"]
        assert client.get("/v1/models/gpt-5").status_code == 404
        assert client.get(f"/v1/models/{model}").status_code == 200

    @staticmethod
    def _check_it_serves(client: httpx.Client, model: str) -> None:
        answer = client.post("/v1/completions", json={"model": model, **COMPLETION})
        assert answer.status_code == 200


class TestTinyModel(WrongRequests):
    """And all that is the same for every model."""

    @pytest.fixture
    def server(self, tiny_server: ServeProcess) -> ServeProcess:
        return tiny_server

    @pytest.fixture
    def model(self) -> str:
        return "tiny-llama"

    @pytest.mark.parametrize(("wrong", "field", "words"), WRONG_COMPLETIONS)
    def test_completion(
        self, client: httpx.Client, model: str, wrong: dict[str, Any], field: str, words: str
    ) -> None:
        answer = client.post("/v1/completions", json={"model": model, **COMPLETION, **wrong})
        assert (answer.status_code, _error(answer)["param"]) == (400, field)
        assert words in _error(answer)["message"]
        self._check_it_serves(client, model)

    @pytest.mark.parametrize(("wrong", "field", "words"), WRONG_CHATS)
    def test_chat(
        self, client: httpx.Client, model: str, wrong: dict[str, Any], field: str, words: str
    ) -> None:
        answer = client.post("/v1/chat/completions", json={"model": model, **CHAT, **wrong})
        assert (answer.status_code, _error(answer)["param"]) == (400, field)
        assert words in _error(answer)["message"]
        self._check_it_serves(client, model)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            pytest.param(b'{"model": ', "not JSON", id="cut off"),
            pytest.param(b"", "not JSON", id="empty"),
            pytest.param(b"\xff\xfe", "not JSON", id="not UTF-8"),
            pytest.param(b"[]", "a JSON object", id="a list"),
            pytest.param(b'"text"', "a JSON object", id="a text"),
            pytest.param(b'{"model": ' + b"[" * 100_000, "not JSON", id="very deep"),
        ],
    )
    def test_a_body_that_is_not_a_json_object(
        self, client: httpx.Client, model: str, content: bytes, words: str
    ) -> None:
        answer = client.post("/v1/completions", content=content)
        assert answer.status_code == 400
        assert words in _error(answer)["message"]
        self._check_it_serves(client, model)

    def test_a_model_that_is_not_named(self, client: httpx.Client) -> None:
        answer = client.post("/v1/completions", json=COMPLETION)
        assert (answer.status_code, _error(answer)["param"]) == (400, "model")

    def test_a_path_or_a_method_that_is_not_there(self, client: httpx.Client) -> None:
        assert client.post("/v1/embeddings", json={}).status_code == 404
        answer = client.get("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert "GET /v1/completions" in _error(answer)["message"]


@pytest.mark.real_model
class TestRealModel(WrongRequests):
    @pytest.fixture
    def model(self, real_model: str) -> str:
        return real_model


def _error(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error
