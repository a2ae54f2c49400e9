"""OpenAI's own client, against a real server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import openai
import pytest
from openai.types.chat import ChatCompletionAssistantMessageParam

from gateway import GatewayConfig
from protocol import NodeLost, Overloaded
from tests.gateway.byte_tokenizer import END, ids
from tests.gateway.gateway_under_test import MODEL, Gateway, Server
from tests.gateway.scripted_backend import Script, ScriptedBackend

KEY = "sk-right"


@pytest.fixture
def script() -> Script:
    return Script(answer=(*ids("Grüße 🙂"), END), chunk_tokens=3, num_cached_tokens=2)


@pytest.fixture
async def server(tmp_path: Path, script: Script) -> AsyncIterator[Server]:
    gateway = Gateway(ScriptedBackend(script), tmp_path, GatewayConfig(api_keys=(KEY,)))
    async with gateway.server() as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        api_key=KEY,
        base_url=f"{server.url}/v1",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, "alias/of-it"]
    assert (await client.models.retrieve("alias/of-it")).owned_by == "kvrelay"


async def test_a_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=20)
    assert [choice.text for choice in answer.choices] == ["Grüße 🙂"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * (len(ids("Grüße 🙂")) + 1)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_a_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt="a", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "Grüße 🙂"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 1 + len(ids("Grüße 🙂")) + 1


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        temperature=0,
        stop=["ße"],
        extra_body={"top_k": 5, "return_token_ids": True},
    )
    assert answer.choices[0].message.content == "Grü"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer._request_id == answer.id
    said = cast(ChatCompletionAssistantMessageParam, answer.choices[0].message.model_dump())
    second = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}, said]
    )
    assert second.choices[0].message.content == "Grüße 🙂"


async def test_a_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Grüße 🙂"
    roles = [c.choices[0].delta.role for c in chunks[:-1]]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None


async def test_the_synchronous_client(server: Server) -> None:
    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(
            api_key=KEY,
            base_url=f"{server.url}/v1",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            whole = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "u"}]
            )
            streamed = client.completions.create(model=MODEL, prompt="a", stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].text for c in streamed)

    assert await asyncio.to_thread(ask) == ("Grüße 🙂", "Grüße 🙂")


async def test_errors_are_the_client_s_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="a", n=0)
    assert (bad.value.param, bad.value.code) == ("n", "invalid_request")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").models.list()


class TestOverload:
    @pytest.fixture
    def script(self) -> Script:
        return Script(refusal=Overloaded("full", 7))

    async def test_it_is_a_rate_limit(self, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.RateLimitError) as error:
            await client.completions.create(model=MODEL, prompt="a")
        assert error.value.response.headers["retry-after"] == "7"


class TestFailureInAStream:
    @pytest.fixture
    def script(self) -> Script:
        return Script(failure=NodeLost("gone"), fail_after=2)

    async def test_the_client_raises(self, client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["h", "e"]
        with pytest.raises(openai.APIError, match="gone"):
            await anext(stream)


async def test_logprobs_and_choices(client: openai.AsyncOpenAI) -> None:
    completion = await client.completions.create(
        model=MODEL, prompt="a", n=2, logprobs=2, max_tokens=3
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["G", "r", "\ufffd"]
        assert choice.logprobs.text_offset == [0, 1, 2]
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] == {"G": -0.5, "H": -0.75}
    chat = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "u"}],
        n=2,
        logprobs=True,
        top_logprobs=1,
        max_tokens=2,
    )
    for answer in chat.choices:
        assert answer.logprobs is not None
        assert answer.logprobs.content is not None
        assert [entry.bytes for entry in answer.logprobs.content] == [[71], [114]]
        assert answer.logprobs.content[0].top_logprobs[0].token == "G"
