"""OpenAI's own client, against the real model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.serve_process import REAL_MODEL, ServeProcess

pytestmark = pytest.mark.real_model

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
COUNTING = "1, 2, 3, 4, 5, 6, 7,"


@pytest.fixture
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        api_key="unused",
        base_url=f"{server.url}/v1",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


@pytest.fixture
async def async_client(server: ServeProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        api_key="unused",
        base_url=f"{server.url}/v1",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [REAL_MODEL]
    assert client.models.retrieve(REAL_MODEL).id == REAL_MODEL


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=REAL_MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=REAL_MODEL, messages=QUESTION, temperature=0)
    *chunks, last = client.chat.completions.create(
        model=REAL_MODEL,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=REAL_MODEL, prompt=COUNTING, temperature=0, max_tokens=6
    )
    assert answer.choices[0].text.startswith(" 8, 9")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_a_completion_stream(client: openai.OpenAI) -> None:
    *chunks, last = client.completions.create(
        model=REAL_MODEL,
        prompt=COUNTING,
        temperature=0,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith(" 8, 9")
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 5 + ["length"]
    assert last.usage is not None
    assert last.usage.completion_tokens == 6


def test_a_prompt_of_token_ids(client: openai.OpenAI) -> None:
    by_text = client.completions.create(
        model=REAL_MODEL,
        prompt=COUNTING,
        temperature=0,
        max_tokens=6,
        extra_body={"return_token_ids": True},
    )
    assert by_text.choices[0].model_extra is not None
    token_ids = by_text.choices[0].model_extra["prompt_token_ids"]
    by_ids = client.completions.create(
        model=REAL_MODEL, prompt=token_ids, temperature=0, max_tokens=6
    )
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == len(token_ids)


def test_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=REAL_MODEL,
        prompt=[COUNTING, "Monday, Tuesday, Wednesday,", COUNTING],
        temperature=0,
        max_tokens=6,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.text for choice in answer.choices]
    assert texts[0].startswith(" 8, 9")
    assert "Thursday" in texts[1]
    assert texts[2] == texts[0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18


def test_a_stop_string(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=REAL_MODEL, prompt=COUNTING, temperature=0, max_tokens=50, stop=[" 10", "\n"]
    )
    assert answer.choices[0].text == " 8, 9,"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 12


def test_a_seed_gives_the_same_sample_again(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        answer = client.completions.create(
            model=REAL_MODEL, prompt="Once upon", temperature=1.0, max_tokens=12, seed=seed
        )
        return answer.choices[0].text

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


async def test_the_asynchronous_client(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(
        model=REAL_MODEL, messages=QUESTION, temperature=0
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    stream = await async_client.completions.create(
        model=REAL_MODEL, prompt=COUNTING, temperature=0, max_tokens=6, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text.startswith(" 8, 9")


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=REAL_MODEL) as missing:
        client.completions.create(model="gpt-5", prompt="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model=REAL_MODEL, messages=QUESTION, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="max_tokens") as bad:
        client.completions.create(model=REAL_MODEL, prompt="a", max_tokens=0)
    assert bad.value.param == "max_tokens"
