"""Every error in OpenAI's shape: the right status, the field, a stable code, and no traceback."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import GatewayConfig
from protocol import (
    ClusterStatus,
    GenerationRequest,
    InvalidRequest,
    KvrelayError,
    NodeLost,
    NoHealthyNode,
    Overloaded,
    RequestAborted,
    TransferFailed,
)
from tests.gateway.byte_tokenizer import VOCAB_SIZE, ids
from tests.gateway.gateway_under_test import MAX_MODEL_LEN, Gateway, chat, completion, events
from tests.gateway.scripted_backend import Script, ScriptedBackend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def check_shape(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert "Traceback" not in response.text
    return error


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(ScriptedBackend(), tmp_path)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.client() as client:
        yield client


async def refused(client: httpx.AsyncClient, path: str, body: object) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = check_shape(response)
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe",
        b'{"model": "scripted", "prompt": "\xff"}',
        b'{"model": "scripted", "prompt": "\\ud800"}',
        b'{"model": "scripted", "prompt": NaN}',
        b'{"model": "scripted", "prompt": "a"} trailing',
        b"[" * 200_000,
        b'{"n": ' * 200_000,
        b'{"n": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b"[]",
        b"null",
        b'"text"',
    ],
    ids=lambda content: repr(content[:30]),
)
async def test_a_body_that_is_not_a_json_object(
    client: httpx.AsyncClient, gateway: Gateway, content: bytes
) -> None:
    for path in (COMPLETIONS, CHAT):
        response = await client.post(path, content=content)
        assert response.status_code == 400
        error = check_shape(response)
        assert error["code"] == "invalid_request"
    assert gateway.backend.streams == []


PROMPT_ERRORS: list[tuple[object, str]] = [
    ("", "prompt"),
    ([], "prompt"),
    ([[]], "prompt[0]"),
    (["a", ""], "prompt[1]"),
    ([1, "a"], "prompt"),
    ([1, [2]], "prompt"),
    (5, "prompt"),
    ({"a": 1}, "prompt"),
    ([1.5], "prompt[0]"),
    ([True], "prompt[0]"),
    ([[1, "a"]], "prompt[0][1]"),
    ([1, VOCAB_SIZE], "prompt[1]"),
    ([-1], "prompt[0]"),
    ([[1], [2, 10**30]], "prompt[1][1]"),
    (["a"] * 65, "prompt"),
]


@pytest.mark.parametrize(("prompt", "field"), PROMPT_ERRORS)
async def test_wrong_prompts(client: httpx.AsyncClient, prompt: object, field: str) -> None:
    error = await refused(client, COMPLETIONS, completion(prompt))
    assert error["param"] == field


MESSAGE_ERRORS: list[tuple[object, str, str]] = [
    ([], "messages", "length"),
    ("hi", "messages", "array"),
    ([5], "messages[0]", "object"),
    ([{"role": "user"}], "messages[0]", "content"),
    ([{"content": "a"}], "messages[0]", "role"),
    ([{"role": "king", "content": "a"}], "messages[0].role", "king"),
    ([{"role": "tool", "content": "a"}], "messages[0].role", "tool"),
    ([{"role": "user", "content": None}], "messages[0].content", "null"),
    ([{"role": "user", "content": 7}], "messages[0].content", "int"),
    ([{"role": "user", "content": "a", "mood": "good"}], "messages[0]", "mood"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content[0].type",
        "image_url",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", "text"),
    (
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
        "messages[0].tool_calls",
        "length",
    ),
]


@pytest.mark.parametrize(("messages", "field", "word"), MESSAGE_ERRORS)
async def test_wrong_messages(
    client: httpx.AsyncClient, messages: object, field: str, word: str
) -> None:
    error = await refused(client, CHAT, {"model": "scripted", "messages": messages})
    assert error["param"] == field
    assert word in error["message"]


FIELD_ERRORS: list[tuple[str, object]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 5.0),
    ("max_tokens", True),
    ("max_tokens", 10**30),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("seed", "x"),
    ("seed", 2**63),
    ("stream", 1),
    ("stream", "yes"),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("stop_token_ids", 5),
    ("ignore_eos", "no"),
    ("return_token_ids", 1),
    ("priority", 2**63),
    ("priority", 0.5),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("user", 5),
    ("metadata", "x"),
    ("model", None),
    ("model", 5),
    ("stream_options", {"include_usage": True}),  # without stream
    ("stream_options", 5),
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("n", "1"),
    ("n", True),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", "x"),
    ("presence_penalty", 2.1),
    ("presence_penalty", "x"),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", []),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 101),
    ("repetition_penalty", "x"),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than may follow
    ("min_tokens", 1.5),
    ("logit_bias", 5),
    ("logit_bias", [5]),
    ("logit_bias", {"5": 100.5}),
    ("logit_bias", {"5": -101}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {str(10**30): 1}),
    ("logit_bias", {f"{i:04}": 1 for i in range(1025)}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", 1.5),
    ("logprobs", "1"),
    ("stop_token_ids", [1] * 1025),
    ("return_tokens_as_token_ids", 1),
    # What is known and not supported.
    ("best_of", 2),
    ("prompt_logprobs", 1),
    ("echo", True),
    ("response_format", {"type": "json_object"}),
    ("store", True),
    ("kv_transfer_params", {"do_remote_prefill": True}),
    # What is unknown.
    ("max_tokns", 5),
    ("", 5),
    ("unknown", None),
]


@pytest.mark.parametrize(("name", "value"), FIELD_ERRORS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_wrong_unsupported_and_unknown_fields(
    client: httpx.AsyncClient, gateway: Gateway, path: str, name: str, value: object
) -> None:
    body = completion() if path == COMPLETIONS else chat()
    error = await refused(client, path, {**body, "max_tokens": 16, name: value})
    assert error["param"] == (name or None)
    assert error["message"].startswith(f"{name}:")
    assert error["code"] == "invalid_request"
    assert gateway.backend.streams == []


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "messages", []),
        (COMPLETIONS, "max_completion_tokens", 5),
        (COMPLETIONS, "tools", []),
        (CHAT, "prompt", "a"),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "functions", [{}]),
        (COMPLETIONS, "logprobs", True),
        (COMPLETIONS, "top_logprobs", 3),
        (CHAT, "logprobs", 3),
        (CHAT, "top_logprobs", 3),  # without logprobs
        (CHAT, "top_logprobs", 21),
        (CHAT, "top_logprobs", -1),
        (CHAT, "top_logprobs", True),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "audio", {"voice": "x"}),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "web_search_options", {}),
        (CHAT, "max_completion_tokens", 0),
    ],
)
async def test_fields_of_one_endpoint(
    client: httpx.AsyncClient, path: str, name: str, value: object
) -> None:
    body = completion() if path == COMPLETIONS else chat()
    error = await refused(client, path, {**body, name: value})
    assert error["param"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usag": True}, "stream": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop_token_ids": [3, "x"]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [3, VOCAB_SIZE]}, "stop_token_ids[1]"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"logit_bias": {"5": "a"}}, "logit_bias[...]"),
        ({"prompt": ["a", "b"], "n": 65}, "n"),
    ],
)
async def test_errors_inside_a_field(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    assert (await refused(client, COMPLETIONS, completion(**fields)))["param"] == param


@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "top_p", "min_p", "logprobs", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ],
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_numbers_that_are_none(
    client: httpx.AsyncClient, path: str, name: str, number: str
) -> None:
    """Python's json writes three of them, and each is told by the name of its field."""
    body = json.dumps(completion() if path == COMPLETIONS else chat())
    value = f'{{"5": {number}}}' if name == "logit_bias" else number
    response = await client.post(path, content=f'{body[:-1]}, "{name}": {value}}}')
    assert response.status_code == 400
    error = check_shape(response)
    assert error["param"].startswith(name)
    assert error["message"].startswith(name)


@pytest.mark.parametrize(
    ("path", "name", "value", "limit"),
    [
        (COMPLETIONS, "logprobs", 21, "20"),
        (CHAT, "top_logprobs", 21, "20"),
        (COMPLETIONS, "n", 129, "128"),
        (CHAT, "presence_penalty", -2.5, "-2.0"),
        (CHAT, "frequency_penalty", 2.5, "2.0"),
        (COMPLETIONS, "repetition_penalty", 0, "0.01"),
        (COMPLETIONS, "min_p", 2, "1.0"),
        (COMPLETIONS, "min_tokens", 99, "16"),
        (CHAT, "logit_bias", {"3": 101}, "100"),
        (CHAT, "logit_bias", {"999": 1}, str(VOCAB_SIZE)),
        (CHAT, "stop_token_ids", [1] * 1025, "1024"),
    ],
)
async def test_the_limit_is_told(
    client: httpx.AsyncClient, path: str, name: str, value: object, limit: str
) -> None:
    body = completion(max_tokens=16) if path == COMPLETIONS else chat(logprobs=True)
    error = await refused(client, path, {**body, name: value})
    assert limit in error["message"].split(":", 1)[1]


@pytest.mark.parametrize(
    ("path", "body", "missing"),
    [
        (COMPLETIONS, {"model": "scripted"}, "prompt"),
        (COMPLETIONS, {"prompt": "a"}, "model"),
        (CHAT, {"model": "scripted"}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, "model"),
    ],
)
async def test_missing_fields(
    client: httpx.AsyncClient, path: str, body: object, missing: str
) -> None:
    error = await refused(client, path, body)
    assert error["param"] == missing
    assert "required" in error["message"]


async def test_the_two_names_of_max_tokens_must_agree(client: httpx.AsyncClient) -> None:
    error = await refused(client, CHAT, chat(max_tokens=3, max_completion_tokens=4))
    assert error["param"] == "max_tokens"


class TestLengths:
    @pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 9])
    async def test_a_prompt_that_is_too_long(self, client: httpx.AsyncClient, length: int) -> None:
        for prompt, field in (("x" * length, "prompt"), ([[1] * length], "prompt[0]")):
            error = await refused(client, COMPLETIONS, completion(prompt))
            assert error["code"] == "prompt_too_long"
            assert error["param"] == field
            assert str(length) in error["message"]
            assert str(MAX_MODEL_LEN) in error["message"]

    async def test_messages_that_are_too_long(self, client: httpx.AsyncClient) -> None:
        error = await refused(client, CHAT, chat("x" * 100))
        assert (error["code"], error["param"]) == ("prompt_too_long", "messages")

    async def test_more_output_than_fits(self, client: httpx.AsyncClient) -> None:
        assert (await client.post(COMPLETIONS, json=completion("x" * 60, max_tokens=4))).is_success
        error = await refused(client, COMPLETIONS, completion("x" * 60, max_tokens=5))
        assert error["param"] == "max_tokens"
        for number in ("60", "5", "65", str(MAX_MODEL_LEN)):
            assert number in error["message"].replace(",", "").split()
        error = await refused(client, CHAT, chat(max_completion_tokens=MAX_MODEL_LEN))
        assert error["param"] == "max_completion_tokens"


async def test_a_model_that_is_not_served(client: httpx.AsyncClient) -> None:
    for response in (
        await client.post(COMPLETIONS, json={**completion(), "model": "gpt-9"}),
        await client.post(CHAT, json={**chat(), "model": "gpt-9"}),
        await client.get("/v1/models/gpt-9"),
    ):
        assert response.status_code == 404
        error = check_shape(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-9" in error["message"]
        assert "scripted" in error["message"]


async def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    async with Gateway(ScriptedBackend(), tmp_path, template=None).client() as client:
        error = await refused(client, CHAT, chat())
    assert error["param"] == "messages"


async def test_a_template_that_makes_nothing(tmp_path: Path) -> None:
    async with Gateway(ScriptedBackend(), tmp_path, template="{# nothing #}").client() as client:
        error = await refused(client, CHAT, chat())
    assert "empty" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert check_shape(response)["code"] == code
    assert ("allow" in response.headers) == (status == 405)


class TestLargeBodies:
    @pytest.fixture
    def gateway(self, tmp_path: Path) -> Gateway:
        return Gateway(ScriptedBackend(), tmp_path, GatewayConfig(max_body_bytes=1000))

    async def test_announced(self, client: httpx.AsyncClient) -> None:
        response = await client.post(COMPLETIONS, content=b"x" * 1001)
        assert response.status_code == 413
        error = check_shape(response)
        assert error["code"] == "body_too_large"
        assert "1000" in error["message"]

    async def test_not_announced(self, client: httpx.AsyncClient) -> None:
        sent = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += 100
                yield b"x" * 100

        response = await client.post(COMPLETIONS, content=endless())
        assert response.status_code == 413
        check_shape(response)
        assert sent <= 1200  # it stops reading where the limit is

    async def test_one_that_just_fits(self, client: httpx.AsyncClient) -> None:
        body = json.dumps(completion())
        response = await client.post(COMPLETIONS, content=body + " " * (1000 - len(body)))
        assert response.status_code == 200

    async def test_over_a_network(self, gateway: Gateway) -> None:
        async with gateway.server() as server, server.client() as client:
            response = await client.post(COMPLETIONS, content=b"x" * 5_000_000)
            assert response.status_code == 413
            assert check_shape(response)["code"] == "body_too_large"
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 200


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "retry_after"),
    [
        (Overloaded("too many", 2.1), 429, "rate_limit_error", "3"),
        (NoHealthyNode("no decode node"), 503, "service_unavailable_error", "5"),
        (InvalidRequest("prompt", "no node could hold it"), 400, "invalid_request_error", None),
        (RequestAborted("shutting down"), 503, "service_unavailable_error", None),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_refusals_of_the_backend(
    tmp_path: Path,
    refusal: KvrelayError,
    status: int,
    kind: str,
    retry_after: str | None,
    streams: bool,
) -> None:
    gateway = Gateway(ScriptedBackend(Script(refusal=refusal)), tmp_path)
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json=completion(stream=streams))
    assert response.status_code == status
    error = check_shape(response)
    assert (error["type"], error["code"]) == (kind, refusal.label)
    assert error["message"] == str(refusal)
    assert response.headers.get("retry-after") == retry_after
    counted = gateway.metric(
        "kvrelay_requests_total", endpoint="completions", outcome=refusal.label
    )
    assert counted == 1


async def test_when_one_prompt_is_refused_the_others_are_closed(tmp_path: Path) -> None:
    refusal = Overloaded("too many", 0.0)
    backend = ScriptedBackend(
        lambda request: Script(refusal=refusal if request.request_id.endswith("-2") else None)
    )
    async with Gateway(backend, tmp_path).client() as client:
        response = await client.post(COMPLETIONS, json=completion(["a", "b", "c"]))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert [stream.closed.is_set() for stream in backend.streams] == [True, True]


FAILURES = [
    NodeLost("decode-1 is gone"),
    TransferFailed("deadline"),
    ValueError("secret detail of a bug"),
]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("streams", [False, True])
async def test_failures_before_the_first_token_are_http_errors(
    tmp_path: Path, failure: Exception, streams: bool
) -> None:
    backend = ScriptedBackend(Script(failure=failure))
    async with Gateway(backend, tmp_path).client() as client:
        response = await client.post(COMPLETIONS, json=completion(stream=streams))
    assert response.status_code == 500
    error = check_shape(response)
    assert error["code"] == getattr(failure, "label", "internal_error")
    assert "secret" not in response.text
    backend.assert_nothing_left()


@pytest.mark.parametrize("failure", FAILURES)
async def test_failures_in_a_stream_are_its_last_event(tmp_path: Path, failure: Exception) -> None:
    backend = ScriptedBackend(Script(answer=ids("abc"), failure=failure, fail_after=2))
    gateway = Gateway(backend, tmp_path)
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json=completion(stream=True))
    assert response.status_code == 200
    first, second, last = events(response.text)
    assert [event["choices"][0]["text"] for event in (first, second)] == ["a", "b"]
    label = getattr(failure, "label", "internal_error")
    assert last["error"]["code"] == label
    assert list(last) == ["error"]
    assert "secret" not in response.text
    backend.assert_nothing_left()
    assert gateway.metric("kvrelay_requests_total", endpoint="completions", outcome=label) == 1


async def test_when_one_choice_fails_the_others_are_closed(tmp_path: Path) -> None:
    def script(request: GenerationRequest) -> Script:
        if request.request_id.endswith("-1"):
            return Script(failure=NodeLost("gone"), fail_after=2)
        return Script(hang_after=1)

    backend = ScriptedBackend(script)
    async with Gateway(backend, tmp_path).client() as client:
        response = await client.post(COMPLETIONS, json=completion(["a", "b", "c"], stream=True))
    assert events(response.text)[-1]["error"]["code"] == "node_lost"
    assert all(stream.closed.is_set() for stream in backend.streams)


async def test_a_bug_in_a_route_that_streams_nothing(tmp_path: Path) -> None:
    class Broken(ScriptedBackend):
        async def status(self) -> ClusterStatus:
            raise ZeroDivisionError("secret")

    async with Gateway(Broken(), tmp_path).client() as client:
        response = await client.get("/cluster")
    assert response.status_code == 500
    assert check_shape(response)["code"] == "internal_error"
    assert "secret" not in response.text
